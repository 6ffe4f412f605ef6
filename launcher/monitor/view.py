"""The figures of a job in words: in the live part of the terminal, as lines of at most its width;
elsewhere in one line. Pure."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from hvdrun.monitor.figures import Figures, Parts, RankFigures, Value
from hvdrun.output.folding import spans
from hvdrun.output.pane import Line

# From so many columns on there is room for the hosts, and for the parts in numbers.
HOSTS_FROM, NUMBERS_FROM = 60, 90
_LONGEST_HOST = 20
# After so long a job that tells of no step is told who would.
NO_STEP_S = 60.0
NO_STEP = (
    "no rank has told of a step: DistributedOptimizer tells of its steps, and a script without it"
    " by hvd.report_progress(step=step)"
)
# With fewer rows than this only the line of the speed is shown.
FEWEST_ROWS = 8
_TITLES = ("computing", "data", "waiting for ranks", "communication")
_SHORT = ("compute", "data", "wait", "comm")
_STYLES = ("green", "yellow", "bright_black", "cyan")
_BLOCKS = ("█", "▓", "░", "▒")
_LETTERS = ("#", "d", ".", "~")


class Look(NamedTuple):
    """columns, rows: of the terminal. blocks: it can show them; else letters make the bars."""

    columns: int
    rows: int
    coloured: bool = True
    blocks: bool = True


def render(figures: Figures, look: Look, keys: Sequence[str]) -> list[Line]:
    """keys: the last lines, which say what can be typed. The part takes at most half of the rows,
    and one line at least. Ranks that come last come first where there are more than fit."""
    width = max(1, look.columns - 1)
    status = Text("  ".join([*speed(figures), *map(value, figures.values)]), "bold")
    if look.rows < FEWEST_ROWS:
        return _drawn([status or Text(clock(figures.elapsed_s))], width, look)
    lines = [_head(figures, width, look)]
    lines.append(status if figures.has_pulses else Text("no step yet"))
    is_late = not figures.has_pulses and figures.elapsed_s >= NO_STEP_S
    words = [Text(NO_STEP)] if is_late else []
    words += [Text(text, "bold red") for text in figures.troubles]
    words += [Text(text) for text in figures.verdicts]
    after = [part for text in words for part in _wrapped(text, width)]
    after += [Text(text, "bright_black") for text in keys]
    room = max(look.rows // 2, len(keys) + 2) - len(lines)
    del after[max(0, room - len(keys)) : len(after) - len(keys)]  # the keys stay
    lines += _bars(figures.ranks, room - len(after), width, look)
    return _drawn(lines + after, width, look)


def _head(figures: Figures, width: int, look: Look) -> Text:
    dash = "─" if look.blocks else "-"
    hosts = "" if figures.hosts == 1 else f" on {figures.hosts} hosts"
    ranks = "1 rank" if figures.num_proc == 1 else f"{figures.num_proc} ranks"
    title = f"{dash * 2} hvdrun: {ranks}{hosts}, {clock(figures.elapsed_s)} "
    return Text(title + dash * max(0, width - len(title)), "bright_black")


def _wrapped(text: Text, width: int) -> Iterable[Text]:
    console = Console(file=io.StringIO(), width=width)
    return text.wrap(console, width)


def _bars(ranks: Sequence[RankFigures], room: int, width: int, look: Look) -> list[Text]:
    """A line for each rank, and what its colours mean, if there is room for that."""
    if room < 2 or not any(rank.parts or rank.state for rank in ranks):
        return []
    room -= 1
    shown = list(ranks)
    if len(shown) > room:
        shown = sorted(sorted(ranks, key=_urgency)[: room - 1], key=lambda each: each.rank)
    hosts = look.columns >= HOSTS_FROM
    numbers = look.columns >= NUMBERS_FROM
    longest = max(len(str(each.rank)) for each in ranks)
    host_width = max(min(_LONGEST_HOST, len(each.host)) for each in ranks) if hosts else 0
    indent = 5 + longest + 1 + (host_width + 1 if hosts else 0)
    bar = max(4, width - indent - 9 - (22 if numbers else 0))
    lines = []
    if any(each.parts for each in shown):
        lines.append(_legend(width, look, " " * (indent + 9) if width >= NUMBERS_FROM else ""))
    for each in shown:
        line = Text(f"rank {each.rank:>{longest}} ")
        if hosts:
            line.append(f"{_plain(each.host)[:host_width]:<{host_width}} ")
        if each.parts is None or each.state:
            line.append(each.state or "no step yet", "bold" if each.state else "bright_black")
        else:
            line.append(f"{number(1000 * each.parts.step_s):>5} ms ")
            line.append_text(_bar(each.parts, bar, look))
            if numbers:
                line.append(_shares(each.parts))
        lines.append(line)
    if len(shown) < len(ranks):
        lines.append(Text(f"and {len(ranks) - len(shown)} more ranks, which wait longer"))
    return lines


def _urgency(rank: RankFigures) -> tuple[int, float]:
    """The less a rank waits for others, the later it comes."""
    if rank.state.startswith(("failed", "lost")):
        return 0, 0.0
    return (1, rank.parts.waiting) if rank.parts and not rank.state else (2, 0.0)


def _legend(width: int, look: Look, indent: str) -> Text:
    marks = _BLOCKS if look.blocks else _LETTERS
    titles = _TITLES if width >= HOSTS_FROM else _SHORT
    line = Text(indent)
    for mark, title, style in zip(marks, titles, _STYLES, strict=True):
        line.append(f"{mark} ", style).append(f"{title}  ")
    line.rstrip()
    return line


def _bar(parts: Parts, width: int, look: Look) -> Text:
    marks = _BLOCKS if look.blocks else _LETTERS
    line = Text()
    for mark, style, cells in zip(marks, _STYLES, cells_of(parts, width), strict=True):
        line.append(mark * cells, style)
    return line


def cells_of(parts: Sequence[float], width: int) -> list[int]:
    """The width in whole cells for each part; the largest remainders get the rest."""
    whole = sum(parts)
    if whole <= 0:
        return [0] * len(parts)
    exact = [width * part / whole for part in parts]
    cells = [int(each) for each in exact]
    order = sorted(range(len(parts)), key=lambda index: cells[index] - exact[index])
    for index in order[: width - sum(cells)]:
        cells[index] += 1
    return cells


def _shares(parts: Parts) -> str:
    step_s = parts.step_s or 1.0
    return "".join(f"{100 * part / step_s:5.0f}" for part in parts) + " %"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _drawn(lines: Iterable[Text], width: int, look: Look) -> list[Line]:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="standard" if look.coloured else None,
        no_color=not look.coloured,
        legacy_windows=False,
    )
    drawn = []
    for line in lines:
        line = Text(_plain(line.plain), line.style, spans=line.spans)
        line.rstrip()
        line.truncate(width, overflow="crop")
        with console.capture() as captured:
            console.print(line, end="", no_wrap=True, crop=True, highlight=False, soft_wrap=True)
        drawn.append(Line(captured.get(), line.cell_len))
    return drawn


# ---- in words


def line(figures: Figures) -> str:
    """All in one line."""
    if not figures.has_pulses:
        return ", ".join([clock(figures.elapsed_s), *figures.troubles, NO_STEP])
    parts = [clock(figures.elapsed_s), *speed(figures), *map(value, figures.values)]
    return ", ".join([*parts, *figures.troubles, *figures.verdicts])


def speed(figures: Figures) -> Iterable[str]:
    """How far the job is, and how fast."""
    if figures.step is not None:
        yield f"step {figures.step}"
    elif figures.steps:
        yield f"{figures.steps} step{'' if figures.steps == 1 else 's'}"
    if figures.still_s:
        yield f"no step for {figures.still_s:.0f} s"
    elif figures.steps_per_s is not None:
        yield f"{number(figures.steps_per_s)} steps/s"


def value(given: Value) -> str:
    """As in `loss 0.31`."""
    if not given.no_number:
        return f"{given.name} {given.mean:.4g}"
    few = f"nan on rank{'s' if len(given.no_number) > 1 else ''} {spans(given.no_number)}"
    sound = given.ranks > len(given.no_number)
    return f"{given.name} {few}" + (f" ({given.mean:.4g} on the others)" if sound else "")


def number(given: float) -> str:
    """With three digits."""
    return f"{given:.{0 if given >= 100 else 1 if given >= 10 else 2}f}"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
