"""Histories of jobs in which a rank closes file descriptors that MPI needs."""

from hvdrun.job.actions import EndHosts, Finish
from hvdrun.job.events import RankClosedFiles, RankEnded
from hvdrun.machine.notes import INIT_DONE
from tests.launcher.job.histories import (
    LOST_A_PEER,
    History,
    asked,
    begun,
    ends,
    init,
    over,
    well,
)

CLOSES = (2.2, RankClosedFiles(2, 2.0))

CLOSING = {
    "another rank crashes of it": History(
        [
            *begun(),
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            (2.1, RankEnded(0, "signal 11", 2.1)),
            CLOSES,
            *asked(2.3, 1, 2, 3),
            *over(2.4),
        ],
        ends(2.1, over_at=2.4),
        73,
        culprit=2,
        cause="mpirun-failed",
    ),
    "Open MPI ends another rank because of it": History(
        [
            *begun(),
            CLOSES,
            (2.2, LOST_A_PEER),
            (2.3, RankEnded(0, "code 14", 2.2)),
            *asked(2.4, 1, 2, 3),
            *over(2.5),
        ],
        ends(2.3, over_at=2.5),
        73,
        culprit=2,
        cause="mpirun-failed",
    ),
    "another rank fails by itself": History(
        [
            *begun(),
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            CLOSES,
            (2.3, RankEnded(0, "code 1", 2.2)),
            *asked(2.4, 1, 2, 3),
            *over(2.5),
        ],
        ends(2.3, over_at=2.5),
        1,
        culprit=0,
    ),
    "another rank crashes long after": History(
        [
            *begun(),
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            CLOSES,
            (70.0, RankEnded(0, "signal 11", 70.0)),
            *asked(70.1, 1, 2, 3),
            *over(70.2),
        ],
        ends(70.0, over_at=70.2),
        139,
        culprit=0,
        cause="rank-killed",
    ),
    "it fails itself": History(
        [
            *begun(),
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            CLOSES,
            (3.1, RankEnded(2, "code 15", 3.0)),
            *asked(3.2, 0, 1, 3),
            *over(3.3),
        ],
        ends(3.1, over_at=3.3),
        15,
        culprit=2,
    ),
    "a rank that MPI does not know": History(
        [*begun(), CLOSES, *well(30.0, 0, 1, 2, 3), *over(30.1)],
        [(30.1, EndHosts(3.0)), (30.1, Finish())],
        0,
    ),
    "it runs on": History(
        [
            *begun(),
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            CLOSES,
            *well(30.0, 0, 1, 2, 3),
            *over(30.1),
        ],
        [(30.1, EndHosts(3.0)), (30.1, Finish())],
        0,
    ),
    "Open MPI ends a rank that has lost another one, which still runs": History(
        [
            *begun(),
            (2.0, LOST_A_PEER),
            (2.0, RankEnded(0, "code 14", 2.0)),
            *asked(2.1, 1, 2, 3),
            *over(2.2),
        ],
        ends(2.0, over_at=2.2),
        14,
        culprit=0,
    ),
}
