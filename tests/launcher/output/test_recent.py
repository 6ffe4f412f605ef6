"""Whether a rank's last lines are on the screen right above."""

import pytest

from hvdrun.output.output import BETWEEN, RECENT_LINES, Recent


def shown(*parts):
    recent = Recent()
    for ranks, count in parts:
        recent.add(ranks, b"line\n" * count)
    return recent


@pytest.mark.parametrize(
    ("parts", "rank", "lines", "is_above"),
    [
        ([([1], 3)], 1, 3, True),
        ([([1], 3)], 1, 4, False),
        ([([1], 3)], 0, 3, False),
        ([([1], 3), ([0], BETWEEN)], 1, 3, True),
        ([([1], 3), ([0], BETWEEN + 1)], 1, 3, False),
        ([([1], 3), ([], BETWEEN + 1)], 1, 3, False),
        ([([0, 1, 2], 3)], 2, 3, True),
        ([([1], 3), ([0], 10 * RECENT_LINES)], 1, 3, False),
    ],
)
def test_a_ranks_last_lines(parts, rank, lines, is_above):
    assert shown(*parts).end_with(rank, lines) is is_above
