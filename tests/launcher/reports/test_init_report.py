"""What hvdrun says about ranks that others wait for in init."""

from hvdrun.reports.init_report import ENDED, NOT_STARTED, Missing, what_they_do
from hvdrun.reports.looks import Frame, Look, Process

MAIN = (Frame("/me/train.py", 30, "main", ""),)
ABSENT = "it has not imported hvdlite"


def rank(host="a", frames=(), why="", command="python train.py", **more):
    process = Process(7, 1, "S", 2.0, command, True)
    look = Look(1.0, (process,), frames, why)
    return Missing(host, look._replace(frames=None), look, **more)


def test_ranks_at_the_same_place_are_one_entry_and_so_are_those_that_were_not_seen():
    missing = {
        0: Missing("a", instead=NOT_STARTED),
        1: rank("a", MAIN),
        2: rank("b", MAIN),
        3: Missing("b", instead=NOT_STARTED),
        4: Missing("b", instead=ENDED),
        5: rank("b", MAIN, failed=True),
    }
    assert what_they_do(missing, "/me", True) == [
        "ranks 0,3 on a, b have not started",
        "ranks 1-2 on a, b",
        "    train.py:30 in main",
        "rank 4 on b has ended with exit code 0",
        ("rank 5 on b: its hvd.init() has raised an error; it sleeps: python train.py (process 7)"),
        "    train.py:30 in main",
    ]


def test_of_a_rank_without_a_stack_the_report_says_why():
    missing = {
        0: rank(why=ABSENT),
        1: rank(why=ABSENT, command="bash run.sh"),
        2: rank(),  # stopped, for instance
    }
    assert what_they_do(missing, "/me", True) == [
        f"rank 0 on a sleeps: python train.py (process 7); it has loaded MPI; {ABSENT}",
        (
            f"rank 1 on a sleeps: bash run.sh (process 7); it has loaded MPI; {ABSENT}: no process"
            " of it is named python"
        ),
        "rank 2 on a sleeps: python train.py (process 7); it has loaded MPI",
    ]


def test_of_ranks_that_others_wait_for_in_mpi_init_hvdlite_is_not_expected():
    assert ABSENT not in what_they_do({0: rank(why=ABSENT)}, "/me", False)[0]


def test_a_report_has_few_entries_and_counts_the_others():
    missing = {number: rank(f"host{number}", why=ABSENT) for number in range(20)}
    lines = what_they_do(missing, "/me", True, rest=3)
    assert [line.partition(" sleeps")[0] for line in lines] == [
        *(f"rank {number} on host{number}" for number in range(8)),
        "and 15 more",
    ]
    many = {number: rank(f"host{number}", MAIN) for number in range(20)}
    assert what_they_do(many, "/me", True)[0].endswith(" host6, host7 and 12 more hosts")
