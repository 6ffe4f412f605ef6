"""What mpirun's words and the ranks' last lines tell about which failure came first."""

import pytest

from hvdrun.job.verdict import (
    aborted,
    first_failure,
    host_without_words,
    last_lines,
    left_improperly,
)
from hvdrun.reports.failure_report import Failure

IMPROPER = """
prterun has exited due to process rank 3 with PID 29156 on node vm exiting
improperly. There are three reasons this could occur:
""".splitlines()


def test_the_rank_that_left_without_finalize_is_known_by_the_words_of_open_mpi():
    assert left_improperly(IMPROPER) == 3
    said = "prterun noticed that process rank 3 with PID 1 on node vm exited"
    assert left_improperly([said]) is None


def test_a_traceback_is_shown_from_its_first_line_on_and_else_the_last_ten_lines():
    traceback = ["Traceback (most recent call last):", '  File "x"', "ZeroDivisionError: x"]
    assert last_lines(("\n".join(["warning: nothing", *traceback]) + "\n").encode()) == traceback
    said = "".join(f"line {i}\n" for i in range(50)).encode()
    assert last_lines(said) == [f"line {i}" for i in range(40, 50)]
    assert last_lines(b"\r 10%\r 20%\nover\n\n") == [" 20%", "over"]


def test_the_rank_that_called_abort_under_mpich_is_known_by_its_words():
    said = b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(...)\n"
    assert aborted({0: b"Abort, they said\n", 1: said}) == (1, "code 7")
    assert aborted({0: b"fine\n"}) is None


LOST = """
[server1:00000] *** An error occurred in Socket closed
[server1:00000] *** reported by process [3216572417,0]
[server1:00000] *** on a NULL communicator
[server1:00000] *** Unknown error
""".splitlines()
CALLED = [line.replace("a NULL communicator", "communicator MPI_COMM_WORLD") for line in LOST]


@pytest.mark.parametrize(
    ("endings", "said", "first"),
    [
        ([(1, 2.0, False), (0, 1.0, False)], [], 0),  # by time, not by arrival
        ([(0, 1.0, False), (2, 1.1, False)], LOST, 2),
        ([(0, 1.0, False), (2, 1.1, True)], LOST, 2),
        ([(0, 1.0, False), (2, 1.1, True)], CALLED, 0),
        ([(0, 1.0, False), (2, 0.9, True)], [], 0),
        ([(0, 1.0, False)], LOST, 0),
        ([], LOST, None),
    ],
)
def test_the_first_failure_is_the_one_that_the_others_are_a_consequence_of(endings, said, first):
    failures = [Failure(rank, "here", "code 14", at, late) for rank, at, late in endings]
    found = first_failure(failures, said)
    assert (found and found.rank) == first


@pytest.mark.parametrize(
    ("started", "ended", "lost"),
    [
        ({0, 1, 2, 3}, {1}, "b"),  # rank 1 was told that the connection to b closed
        ({0, 1, 2, 3}, {1, 2}, None),
        ({0, 1, 2, 3}, set(), "a"),
        ({0, 1}, {1}, None),  # b's never came up
    ],
)
def test_a_host_whose_ranks_all_go_without_a_word_is_lost(started, ended, lost):
    assert host_without_words({"a": range(2), "b": range(2, 4)}, started, ended) == lost
