"""The figures of a job as lines of a terminal: in several widths, with and without colours."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from hvdrun.monitor.figures import Figures, Parts, RankFigures, Value
from hvdrun.monitor.view import NO_STEP, Look, cells_of, render

KEYS = ("s stacks   q end the job",)
VERDICT = (
    "rank 3 on server2 arrives last in 94 % of steps, by 47 ms: its DataLoader (48 ms of a step)"
)


def figures(ranks=4, **more):
    parts = [
        Parts(0.02, 0.0, 0.06 - 0.02 * (rank % 4), 0.02 + 0.02 * (rank % 4))
        for rank in range(ranks)
    ]
    shown = tuple(
        RankFigures(rank, f"server{rank // 2 + 1}", parts=each) for rank, each in enumerate(parts)
    )
    given = {
        "steps": 1200,
        "steps_per_s": 12.4,
        "values": (Value("loss", 0.3125, ranks),),
        "verdicts": (VERDICT,),
        "has_pulses": True,
    }
    return Figures(751.0, ranks, max(1, ranks // 2), shown, **{**given, **more})


def plain(lines):
    return [re.sub(r"\x1b\[[0-9;]*m", "", line.text) for line in lines]


def shown(figures, columns=100, rows=40, **look):
    return plain(render(figures, Look(columns, rows, **look), KEYS))


def test_a_wide_terminal_shows_everything():
    head, speed, legend, *ranks, verdict, keys = shown(figures(), columns=110)
    assert head.startswith("── hvdrun: 4 ranks on 2 hosts, 0:12:31 ───")
    assert speed == "1200 steps  12.4 steps/s  loss 0.3125"
    assert legend.strip() == "█ computing  ▓ data  ░ waiting for ranks  ▒ communication"
    assert [line[:14] for line in ranks] == [
        f"rank {rank} server{rank // 2 + 1}" for rank in range(4)
    ]
    bars = [re.search("[█▓░▒]+", line)[0] for line in ranks]
    assert len({len(bar) for bar in bars}) == 1
    for rank, bar in enumerate(bars):
        parts = [bar.count(mark) / len(bar) for mark in "█▓░▒"]
        expected = (0.2, 0.0, 0.6 - 0.2 * rank, 0.2 + 0.2 * rank)
        assert parts == pytest.approx(expected, abs=1 / len(bar))
    assert ranks[1].endswith("   20    0   40   40 %")
    assert " 100 ms " in ranks[0]
    assert (verdict, keys) == (VERDICT, KEYS[0])


def test_a_narrow_one_shows_the_bars_without_hosts_and_wraps_the_words():
    lines = shown(figures(), columns=41)
    assert max(map(len, lines)) <= 40
    assert "server1" not in "".join(line for line in lines if "█" in line)
    assert " ".join(line.strip() for line in lines if "rank 3 on" in line or "DataL" in line)
    assert "".join(lines).replace(" ", "").find(VERDICT.replace(" ", "")) > 0


def test_a_low_one_shows_one_line():
    assert shown(figures(), rows=7) == ["1200 steps  12.4 steps/s  loss 0.3125"]


@pytest.mark.parametrize("rows", [8, 10, 14, 24, 50])
@pytest.mark.parametrize("columns", [20, 60, 200])
def test_it_takes_at_most_half_of_the_terminal_and_always_has_the_keys(columns, rows):
    lines = shown(figures(64, troubles=("no sign of life of server2 for 12 s",)), columns, rows)
    assert len(lines) <= max(rows // 2, 4)
    assert lines[-1] == KEYS[0][: columns - 1]
    assert lines[1].startswith("1200 steps")


def test_of_many_ranks_those_that_wait_least_are_shown():
    lines = [line for line in shown(figures(64), rows=24) if line.startswith("rank ")]
    ranks = [int(line.split()[1]) for line in lines if "arrives" not in line]
    assert ranks
    assert all(rank % 4 == 3 for rank in ranks)
    assert ranks == sorted(ranks)
    rest = [line for line in shown(figures(64), rows=24) if line.startswith("and ")]
    assert rest == [f"and {64 - len(ranks)} more ranks, which wait longer"]


def test_a_rank_that_has_failed_is_shown_first_and_without_a_bar():
    ranks = figures(64).ranks
    failed = ranks[8]._replace(state="failed: code 3")
    lines = shown(figures()._replace(num_proc=64, ranks=(*ranks[:8], failed, *ranks[9:])), rows=20)
    (line,) = [line for line in lines if "code 3" in line]
    assert line.endswith("failed: code 3")


def test_before_the_first_step_it_says_who_would_tell_of_one():
    started = tuple(RankFigures(rank, "a") for rank in range(2))
    assert shown(Figures(3.0, 2, 1, started))[1:] == ["no step yet", *KEYS]
    lines = shown(Figures(70.0, 2, 1, started), columns=60)
    assert " ".join(lines[1:-1]) == f"no step yet {NO_STEP}"


def test_a_terminal_without_colours_gets_none():
    text = "".join(line.text for line in render(figures(), Look(80, 24, coloured=False), KEYS))
    assert "\x1b[3" not in text
    coloured = "".join(line.text for line in render(figures(), Look(80, 24), KEYS))
    assert "\x1b[32m" in coloured


def test_letters_make_the_bars_where_blocks_can_not_be_shown():
    lines = shown(figures(), blocks=False)
    assert all(line.isascii() for line in lines)
    assert any("~~" in line and ".." in line and "##" in line for line in lines)


NAMES = st.text(max_size=40)
RANKS = st.builds(
    RankFigures,
    st.integers(0, 999_999),
    NAMES,
    st.sampled_from(["", "failed", "ended"]),
    st.none() | st.builds(Parts, *[st.floats(0, 1e12)] * 4),
)


@given(
    st.lists(RANKS, max_size=40).map(tuple),
    st.lists(NAMES, max_size=5).map(tuple),
    st.integers(1, 200),
    st.integers(1, 60),
    st.booleans(),
)
def test_whatever_is_shown_no_line_is_too_long_and_none_changes_the_terminal(
    ranks, words, columns, rows, has_pulses
):
    given = Figures(1e9, len(ranks), 3, ranks, 7, 1e-9, 1e6, 3, (), words, words, has_pulses)
    lines = render(given, Look(columns, rows), KEYS)
    assert 1 <= len(lines) <= max(rows // 2, 4)
    for line, text in zip(lines, plain(lines), strict=True):
        assert text.isprintable()
        assert cell_len(text) <= line.cells <= max(1, columns - 1)


@given(st.lists(st.floats(0, 1e9), min_size=4, max_size=4), st.integers(0, 300))
def test_the_cells_of_a_bar_are_as_many_as_it_is_wide(parts, width):
    cells = cells_of(parts, width)
    assert sum(cells) == (width if sum(parts) > 0 else 0)
    assert min(cells) >= 0
