"""The ranks' last operations in the report on a job, and when they are not told."""

import json
import struct
import zlib

import pytest

from hvdrun.job.events import Interrupted, RankEnded, RankRecorded, RankSaid
from hvdrun.machine.box_layout import LARGEST_BYTES
from hvdrun.machine.notes import PREEMPTED
from tests.launcher.job.histories import TERM, asked, begun, over, play, well

LAST = "hvdrun: the last operation that ranks 0-3 have all ended is allreduce 'a'"


def recorded(at, rank, names, ended, lines=b""):
    """The rank has called these operations, and this many of them have ended; lines: from which it
    has waited last."""
    head = json.dumps({"format": 3, "kinds": ["allreduce"], "to_wall_ns": 0}).encode()
    entries = b""
    for place, name in enumerate(names):
        times = (1, 2, 3, 4) if place < ended else (1, 0, 0, 0)
        words = (place + 1, ord(name), *times, 12, 9, 1, 0, 4, -1, 0, 0, 0, name.encode())
        entries += struct.pack("=QQQQQQQIIIIiBBBx112s", *words)
    return [(at, RankRecorded(rank, zlib.compress(b"\0".join((head, lines, entries)))))]


def operations():
    """Rank 1 did not come to what the others wait in."""
    return [
        each
        for rank in range(4)
        for each in recorded(1.0, rank, "a" if rank == 1 else "ab", ended=1)
    ]


FAILS = [(1.1, RankEnded(1, "signal 9", 1.1)), *asked(1.2, 0, 2, 3), *over(1.3, 137)]


def test_the_report_on_a_rank_that_failed_ends_with_them():
    _, _, verdict = play([*begun(), *operations(), *FAILS])
    assert verdict.report.operations == (
        LAST,
        "    ranks 0,2-3 went on to allreduce 'b', which rank 1 has not called",
        "    rank 1 called no operation after that",
    )
    assert verdict.lines(repeat=False)[-3:] == list(verdict.report.operations)


def test_of_a_rank_that_was_killed_it_is_said_where_it_last_waited():
    lines = b'  File "/job/train.py", line 12 in main\n  File "/job/train.py", line 20 in <module>'
    _, _, verdict = play([*begun(), *recorded(1.0, 1, "a", ended=1, lines=lines), *FAILS])
    assert verdict.report.waited_at == "/job/train.py:12 in main"


def test_a_rank_that_left_is_told_from_one_that_was_ended():
    history = [*begun(), *operations(), *well(1.05, 1)]
    history += [(1.1, RankEnded(0, "code 1", 1.1)), *asked(1.2, 2, 3), *over(1.3, 1)]
    _, _, verdict = play(history)
    last = "    rank 1 called no operation after that and ended with exit code 0"
    assert last in verdict.lines()


def test_a_rank_that_left_is_to_blame_for_one_that_missed_it_and_ended_without_a_word():
    def verdict(left_at, tails=None):
        history = [*begun(), *operations(), *well(left_at, 1)]
        history += [(1.1, RankEnded(0, "code 14", 1.1)), *asked(1.2, 2, 3), *over(1.3, 1)]
        return play(sorted(history, key=lambda event: event[0]), tails=tails)[-1]

    assert "rank 1 on a ended with exit code 0" in str(verdict(1.05).error)
    first = verdict(1.05).lines()[0]
    assert first.startswith("hvdrun: rank 1 had left when rank 0 on a ended with exit code 14")
    assert verdict(1.05, {0: b"ValueError: no such file\n"}).culprit == 0
    assert verdict(1.15).culprit == 0  # it left because of rank 0
    died = {0: b"  raise x\nhvdlite.errors.HorovodInternalError: rank %d on a has died\n"}
    found = verdict(1.05, {0: died[0] % 1})
    assert "rank 1 on a ended with exit code 0" in str(found.error)
    assert found.lines()[0].startswith("hvdrun: rank 1 had left when rank 0 on a ended with exit")
    assert verdict(1.05, {0: died[0] % 2}).culprit == 0  # rank 2 runs


@pytest.mark.parametrize(
    "history",
    [
        [*well(1.1, 0, 1, 2, 3), *over(1.3)],
        [(1.05, Interrupted(TERM, 0)), *asked(1.2, 0, 1, 2, 3), *over(1.3, 1)],
        [
            *((1.05, RankSaid(rank, PREEMPTED)) for rank in range(4)),
            *well(1.1, 0, 1, 2, 3),
            *over(1.3),
        ],
    ],
    ids=["ended well", "interrupted", "preempted"],
)
def test_a_job_that_has_not_failed_has_no_such_report(history):
    course, _, verdict = play([*begun(), *operations(), *history])
    assert not any("last operation" in line for line in verdict.lines())
    assert course.recorded.summary()[0] == LAST.removeprefix("hvdrun: ")


def test_what_is_too_long_or_of_no_rank_is_dropped():
    noise = [(1.0, RankRecorded(0, b"x" * (LARGEST_BYTES + 1)))]
    noise += [(1.0, RankRecorded(rank, b"x")) for rank in (-1, 4, 1)]
    course, _, verdict = play([*begun(), *noise, *FAILS])
    assert verdict.exit_code == 137
    assert set(course.recorded.packed) == {1}
    assert course.recorded.boxes() == course.recorded.rows() == {}
