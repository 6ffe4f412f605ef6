"""`python -m hvdlite.report run.json`: makes the page."""

from __future__ import annotations

import os

import click

from hvdlite.report.page import default_output, html
from hvdlite.report.trace import NotATimeline, read
from hvdrun.for_hvdlite import open_file


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("timeline", type=click.Path())
@click.option(
    "-o", "--output", type=click.Path(), help="The page; by default run.html for run.json."
)
def main(timeline: str, output: str | None) -> None:
    """Makes a page of HTML from TIMELINE, a file of `hvdrun --timeline-filename`: step times, how
    much communication is hidden, bandwidth, late ranks and the critical path. The page loads
    nothing; open it in any browser."""
    place = output or default_output(timeline)
    try:
        if os.path.exists(place) and os.path.samefile(place, timeline):
            raise click.UsageError(f"the page would overwrite the timeline {timeline!r}; pass -o")
        page = html(read(timeline), os.path.basename(timeline))
    except NotATimeline as error:
        raise click.ClickException(f"can't report on {timeline!r}: {error}") from error
    except OSError as error:
        raise click.ClickException(f"can't read {timeline!r}: {error.strerror}") from error
    try:
        descriptor = open_file(os.path.abspath(place), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(page)
    except OSError as error:
        raise click.ClickException(f"can't write {place!r}: {error}") from error
    click.echo(place)


if __name__ == "__main__":
    main(prog_name="python -m hvdlite.report")
