"""Histories of jobs in which a rank closes file descriptors that MPI needs."""

from hvdrun.job.events import RankClosedFiles
from hvdrun.machine.notes import INIT_DONE
from tests.launcher.job.histories import (
    LOST_A_PEER,
    all_well,
    asked,
    begun_history,
    closes,
    ended,
    ends,
    init,
    over,
)

CLOSES = (2.2, RankClosedFiles(2, 2.0))

CLOSING = {
    "another rank crashes of it": begun_history(
        [
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            ended(2.1, 0, "signal 11"),
            CLOSES,
            *asked(2.3, 1, 2, 3),
            *over(2.4),
        ],
        ends(2.1, over_at=2.4),
        73,
        culprit=2,
        cause="mpirun-failed",
    ),
    "Open MPI ends another rank because of it": begun_history(
        [
            CLOSES,
            (2.2, LOST_A_PEER),
            ended(2.3, 0, "code 14", by=2.2),
            *asked(2.4, 1, 2, 3),
            *over(2.5),
        ],
        ends(2.3, over_at=2.5),
        73,
        culprit=2,
        cause="mpirun-failed",
    ),
    "another rank fails by itself": begun_history(
        [
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            CLOSES,
            ended(2.3, 0, "code 1", by=2.2),
            *asked(2.4, 1, 2, 3),
            *over(2.5),
        ],
        ends(2.3, over_at=2.5),
        1,
        culprit=0,
    ),
    "another rank crashes long after": begun_history(
        [
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            CLOSES,
            ended(70.0, 0, "signal 11"),
            *asked(70.1, 1, 2, 3),
            *over(70.2),
        ],
        ends(70.0, over_at=70.2),
        139,
        culprit=0,
        cause="rank-killed",
    ),
    "it fails itself": begun_history(
        [
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            CLOSES,
            ended(3.1, 2, "code 15", by=3.0),
            *asked(3.2, 0, 1, 3),
            *over(3.3),
        ],
        ends(3.1, over_at=3.3),
        15,
        culprit=2,
    ),
    "a rank that MPI does not know": begun_history(
        [CLOSES, *all_well(30.0)],
        closes(30.1),
    ),
    "it runs on": begun_history(
        [
            *init(1.0, 0, 1, 2, 3),
            *init(1.1, 0, 1, 3, kind=INIT_DONE),  # rank 2 may never tell it
            CLOSES,
            *all_well(30.0),
        ],
        closes(30.1),
    ),
    "Open MPI ends a rank that has lost another one, which still runs": begun_history(
        [(2.0, LOST_A_PEER), ended(2.0, 0, "code 14"), *asked(2.1, 1, 2, 3), *over(2.2)],
        ends(2.0, over_at=2.2),
        14,
        culprit=0,
    ),
}
