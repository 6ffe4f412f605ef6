"""Histories of jobs whose ranks wait in hvd.init() or MPI_Init for others."""

from hvdrun.job.actions import Look
from hvdrun.job.events import RankLeftMpi
from hvdrun.machine.notes import INIT_DONE, INIT_FAILED
from tests.launcher.job.histories import (
    History,
    all_well,
    asked,
    begun,
    begun_history,
    closes,
    command,
    ended,
    ends,
    in_mpi,
    init,
    looks,
    over,
    seen,
    well,
)

# Processes that a rank has started.
COPIES = [
    [201, 103, "S", 0.0, "sh fetch", False, ""],
    [
        202,
        201,
        "D",
        0.0,
        "cp /data \x1b[2J",
        False,
        "reads from /data/x \x1b[2J (nfs4 of server9:/)",
    ],
]

# Calls in Python.
DATA, MAIN = ["/me/data.py", 7, "load", ""], ["/me/train.py", 3, "main", ""]

INIT = {
    "all ranks are in init at about the same time": begun_history(
        [
            *init(1.0, 0, 1, 2),
            *init(9.9, 3),
            *init(10.0, 0, 1, 2, 3, kind=INIT_DONE),
            *all_well(500.0),
        ],
        closes(500.1),
    ),
    "init does not end on two ranks, which compute in it": begun_history(
        [
            *init(1.0, 0, 1, 2),
            *init(2.0, 3),
            *init(2.1, 0, 1, kind=INIT_DONE),
            *seen(11.6, 2, 5.0, "R", by=70.0),
            *seen(11.6, 3, 5.0, "R", by=70.0),
            *seen(12.2, 2, 6.0, "R", by=71.0, frames=[DATA, MAIN]),
            *seen(12.2, 3, 6.0, "R", by=71.0, frames=[DATA, MAIN]),
            *init(15.0, 2, 3, kind=INIT_DONE),
            *all_well(20.0),
        ],
        [*looks(11.5, 2, 3), *closes(20.1)],
    ),
    "init does not end, and the stall check is to end the job": begun_history(
        [*init(1.0, 0, 1, 2, 3), *asked(8.1, 0, 1, 2, 3), *over(8.2)],
        ends(8.0, over_at=8.2),
        75,
        cause="start-timeout",
        options={"job": command({"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "7"}, a=2, b=2)},
    ),
    "a rank ends with 0 before init, and the others wait there": begun_history(
        [*init(1.0, 0, 2, 3), *well(2.0, 1), *asked(7.1, 0, 2, 3), *over(7.2)],
        ends(7.0, over_at=7.2),
        73,
        culprit=1,
        cause="left-early",
    ),
    "a rank ends with 0 before init, and the others come there later": begun_history(
        [*well(2.0, 1), *init(30.0, 0), *init(31.0, 2, 3), *asked(35.1, 0, 2, 3), *over(35.2)],
        ends(35.0, over_at=35.2),
        73,
        culprit=1,
        cause="left-early",
    ),
    "two ranks end with 0 before init, and the second puts off the end": begun_history(
        [*init(1.0, 0, 2), *well(2.0, 1), *well(5.0, 3), *asked(10.1, 0, 2), *over(10.2)],
        ends(10.0, over_at=10.2),
        73,
        culprit=1,
        cause="left-early",
    ),
    "a rank ends with 0 before MPI_Init, as PMI shows": begun_history(
        [*in_mpi(1.0, 0, 2, 3), *well(2.0, 1), *asked(7.1, 0, 2, 3), *over(7.2)],
        ends(7.0, over_at=7.2),
        73,
        culprit=1,
        cause="left-early",
    ),
    "ranks end with 0 and none of the others is in init": begun_history(
        [*well(2.0, 1), *well(40.0, 0, 2, 3), *over(40.1)],
        closes(40.1),
    ),
    "a rank fails while others wait for it in init": begun_history(
        [*init(1.0, 0, 2, 3), ended(2.0, 1, "code 4"), *asked(2.1, 0, 2, 3), *over(2.2)],
        ends(2.0, over_at=2.2),
        4,
        culprit=1,
    ),
    "a rank computes for long before init": begun_history(
        [
            *init(1.0, 0, 2, 3),
            *seen(10.6, 1, 5.0, "R", by=70.0),
            *seen(11.1, 1, 5.9, "R", by=71.0),
            *seen(20.7, 1, 14.0, "R", by=80.5),
            *seen(21.2, 1, 14.4, "R", by=81.0),
            *init(30.0, 1),
            *init(30.1, 0, 1, 2, 3, kind=INIT_DONE),
            *all_well(40.0),
        ],
        [*looks(10.5, 1), *looks(20.6, 1), *closes(40.1)],
    ),
    "ranks hang between their import of hvdlite and init": begun_history(
        [
            *init(1.0, 0),
            *(event for r in (1, 2, 3) for event in seen(10.6, r, frames=None)),
            *(event for r in (1, 2) for event in seen(11.1, r, frames=[DATA, MAIN])),
            *seen(11.2, 3, frames=None),  # of the question before
            *seen(11.3, 3, why="it has not imported hvdlite"),
            *init(20.0, 1, 2, 3),
            *init(20.1, 0, 1, 2, 3, kind=INIT_DONE),
            *all_well(40.0),
        ],
        [*looks(10.5, 1, 2, 3), *closes(40.1)],
    ),
    "a host does not answer": begun_history(
        [
            *init(1.0, 0),
            *seen(11.1, 1),
            *init(40.0, 1, 2, 3),
            *init(40.1, 0, 1, 2, 3, kind=INIT_DONE),
            *all_well(100.0),
        ],
        [*looks(10.5, 1, 2, 3), *looks(25.5, 1, 2, 3), *closes(100.1)],
    ),
    "ranks wait in init for one that has not started, until the start timeout": History(
        [*begun(ranks=(0, 1, 2)), *init(1.0, 0, 1, 2), *asked(60.2, 0, 1, 2), *over(60.3)],
        ends(60.0, over_at=60.3),
        75,
        cause="start-timeout",
    ),
    "the start timeout does not count once all ranks run": begun_history(
        [*all_well(500.0)],
        closes(500.1),
        options={"start_timeout_s": 5.0},
    ),
    "the stall shutdown time ends a wait in init": begun_history(
        [*init(1.0, 0, 1), *asked(6.2, 0, 1, 2, 3), *over(6.3)],
        ends(6.0, over_at=6.3),
        75,
        cause="start-timeout",
        options={"job": command({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}, a=2, b=2)},
    ),
    "without a stall check, a wait in init has neither reports nor an end": begun_history(
        [*init(1.0, 0, 1), *init(900.0, 2, 3), *all_well(999.0)],
        closes(999.1),
        options={
            "job": command(
                {"HVDLITE_STALL_CHECK_DISABLE": "1", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "5"},
                a=2,
                b=2,
            )
        },
    ),
    "a warning time that is shorter than 10 s": begun_history(
        [
            *init(1.0, 0, 1, 2),
            *seen(2.6, 3, 0.0, "S", COPIES),
            *seen(3.1, 3, 0.0, "S", COPIES),
            *init(3.5, 3),
            *init(3.6, 0, 1, 2, 3, kind=INIT_DONE),
            *all_well(9.0),
        ],
        [*looks(2.5, 3), *closes(9.1)],
        options={"job": command({"HVDLITE_STALL_CHECK_TIME_SECONDS": "2"}, a=2, b=2)},
    ),
    "init raises an error on a rank, which goes on": begun_history(
        [
            *init(1.0, 0, 1, 2, 3),
            *init(1.5, 3, kind=INIT_FAILED),
            *seen(10.6, 3, state="T"),
            *seen(11.1, 3, state="T"),
            *well(12.0, 3),
            *asked(17.1, 0, 1, 2),
            *over(17.2),
        ],
        [*looks(10.5, 3), *ends(17.0, over_at=17.2)],
        73,
        culprit=3,
        cause="left-early",
    ),
    "init raises an error on a rank whose host does not answer then": begun_history(
        [
            *init(1.0, 0, 1, 2, 3),
            *init(1.5, 3, kind=INIT_FAILED),
            *init(20.0, 3),
            *init(20.1, 0, 1, 2, 3, kind=INIT_DONE),
            *all_well(40.0),
        ],
        [*looks(10.5, 3), *closes(40.1)],
    ),
    "init raises an error on the rank that waits: nobody says that all have come": begun_history(
        [*init(1.0, 0), *init(20.0, 0, kind=INIT_FAILED), *all_well(40.0)],
        [*looks(10.5, 1, 2, 3), *closes(40.1)],
    ),
    "a rank calls init again, and the others have not": begun_history(
        [
            *init(1.0, 0, 1, 2, 3),
            *init(1.5, 0, 1, 2, 3, kind=INIT_DONE),
            *init(20.0, 2),
            *init(36.0, 0, 1, 3),
            *init(36.1, 0, 1, 2, 3, kind=INIT_DONE),
            *all_well(40.0),
        ],
        [*looks(29.5, 0, 1, 3), *closes(40.1)],
    ),
    "MPI shows the beginning of MPI_Init, and the program calls init later": begun_history(
        [*in_mpi(1.0, 0, 1, 2, 3), *init(2.0, 0), *well(3.0, 1), *asked(6.1, 0, 2, 3), *over(6.2)],
        ends(6.0, over_at=6.2),
        73,
        culprit=1,
        cause="left-early",
    ),
    "ranks wait in MPI_Init for one that comes late": begun_history(
        [
            *in_mpi(1.0, 0, 1, 2),
            *seen(10.6, 3),
            *seen(11.1, 3, why="it has not imported hvdlite"),
            *in_mpi(15.0, 3),
            *((39.0, RankLeftMpi(rank)) for rank in range(4)),
            *all_well(40.0),
        ],
        [*looks(10.5, 3), *closes(40.1)],
    ),
    "a rank that can't tell comes to init": begun_history(
        [*init(1.0, 0, 1, 2), *init(17.0, 0, 1, 2, kind=INIT_DONE), *all_well(40.0)],
        [*looks(10.5, 3), *closes(40.1)],
    ),
    "many ranks are missing": History(
        [
            *begun(ranks=range(46)),
            *init(1.0, 0),
            *init(17.0, *range(1, 46)),
            *init(17.1, *range(46), kind=INIT_DONE),
            *well(40.0, *range(46)),
            *over(40.1),
        ],
        [(10.5, Look(tuple(range(1, 33)))), (11.0, Look(tuple(range(1, 33)), True)), *closes(40.1)],
        options={"job": command(a=2, b=44)},
    ),
}
