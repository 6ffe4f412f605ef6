"""`python -m hvdlite.report run.json`: says what a timeline shows."""

from __future__ import annotations

import os

import click

from hvdlite.report.text import lines
from hvdlite.report.trace import NotATimeline, read


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("timeline", type=click.Path())
def main(timeline: str) -> None:
    """Says what TIMELINE, a file of `hvdrun --timeline-filename`, shows: step times, the critical
    path, and which ranks come last."""
    try:
        trace = read(timeline)
    except NotATimeline as error:
        raise click.ClickException(f"can't report on {timeline!r}: {error}") from error
    except OSError as error:
        raise click.ClickException(f"can't read {timeline!r}: {error.strerror}") from error
    for line in lines(trace, os.path.basename(timeline)):
        click.echo(line)


if __name__ == "__main__":
    main(prog_name="python -m hvdlite.report")
