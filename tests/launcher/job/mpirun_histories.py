"""Histories of mpirun: it fails, hangs or ends early."""

from hvdrun.job.actions import EndAll, EndHosts, Finish
from hvdrun.job.events import HostEnded, KeepersHere, MpirunEnded, MpirunOutputEnded, MpirunSaid
from tests.launcher.job.histories import (
    KILL,
    History,
    all_well,
    asked,
    begun_history,
    closes,
    ended,
    ends,
    over,
    well,
)

MPIRUN = {
    "mpirun fails before any rank is there": History(
        [
            (0.1, MpirunSaid(b"no such option\n")),
            (0.2, MpirunEnded(213)),
            (0.2, MpirunOutputEnded()),
        ],
        closes(0.2),
        73,
        cause="mpirun-failed",
    ),
    "mpirun's last line has no newline": History(
        [
            (0.1, MpirunSaid(b"\nno such")),
            (0.1, MpirunSaid(b" option")),
            (0.2, MpirunEnded(213)),
            (0.2, MpirunOutputEnded()),
        ],
        closes(0.2),
        73,
        cause="mpirun-failed",
    ),
    "mpirun prints an empty line and fails": History(
        [(0.1, MpirunSaid(b"\n")), (0.2, MpirunEnded(1)), (0.2, MpirunOutputEnded())],
        closes(0.2),
        73,
        cause="mpirun-failed",
    ),
    "mpirun fails and prints nothing": History(
        [(0.2, MpirunEnded(-11)), (0.2, MpirunOutputEnded())],
        closes(0.2),
        73,
        cause="mpirun-failed",
    ),
    "mpirun is told to do something else": History(
        [(0.1, MpirunSaid(b"mpirun 5\n")), (0.9, MpirunEnded(0)), (0.9, MpirunOutputEnded())],
        closes(0.9),
    ),
    "mpirun's words come at once with --verbose": History(
        [(0.1, MpirunSaid(b"mpirun 5\n")), (0.9, MpirunEnded(0)), (0.9, MpirunOutputEnded())],
        closes(0.9),
        options={"verbose": True},
    ),
    "mpirun's words about a rank's failure are not shown": begun_history(
        [(2.0, MpirunSaid(b"BAD TERMINATION\n")), ended(2.1, 1, "code 4", by=2.0), *over(9.0)],
        ends(2.1),
        4,
        culprit=1,
    ),
    "a host's words come after mpirun's end": begun_history(
        [
            (2.0, MpirunEnded(1)),
            (2.0, MpirunOutputEnded()),
            ended(3.5, 2, "code 7", by=1.9),
            (3.6, HostEnded("b", "", 1)),
            (3.6, KeepersHere(0)),
        ],
        [(2.0, EndHosts(3.0)), (3.5, EndAll(3.0)), (3.6, Finish())],
        7,
        culprit=2,
    ),
    "a host's words come more than 2 s after mpirun's end": begun_history(
        [
            (2.0, MpirunEnded(1)),
            (2.0, MpirunOutputEnded()),
            ended(4.5, 2, "code 7", by=1.9),
            (4.6, HostEnded("b", "", 1)),
            (4.6, KeepersHere(0)),
        ],
        [(2.0, EndHosts(3.0)), (4.0, EndAll(3.0)), (4.6, Finish())],
        73,
        culprit=0,
        cause="mpirun-failed",
    ),
    "mpirun ends with 0 while ranks have not reported": begun_history(
        [
            (2.0, MpirunEnded(0)),
            (2.0, MpirunOutputEnded()),
            *asked(4.1, 0, 1, 2, 3),
            (4.2, HostEnded("b", "", 0)),
            (4.2, KeepersHere(0)),
        ],
        [(2.0, EndHosts(3.0)), (4.0, EndAll(3.0)), (4.2, Finish())],
        73,
        culprit=0,
        cause="mpirun-failed",
    ),
    "mpirun ends, and its daemon keeps its output open": begun_history(
        [
            *all_well(1.0)[:-1],
            (1.5, MpirunSaid(b"[a:1] a daemon's line\n")),
            (1.6, MpirunOutputEnded()),
        ],
        [(1.1, EndHosts(3.0)), (1.6, Finish())],
    ),
    "mpirun closes its output, and ends later": begun_history(
        [*well(1.0, 0, 1, 2, 3), (1.0, MpirunOutputEnded()), *over(1.5)[:-1]],
        closes(1.5),
    ),
    "keepers of this host are there after mpirun and the other host": begun_history(
        [*well(1.0, 0, 1, 2, 3), *over(1.1)[1:], (1.7, KeepersHere(0))],
        [(1.1, EndHosts(3.0)), (1.7, Finish())],
    ),
    "mpirun is not helped while a keeper of this host is there": begun_history(
        [
            ended(2.0, 1, "code 4"),
            (2.1, HostEnded("b", "", 1)),
            *over(4.0, 1)[:1],
            *over(4.1, 1)[2:],
        ],
        ends(2.0, over_at=4.1),
        4,
        culprit=1,
    ),
    "mpirun is not helped while another host is there": begun_history(
        [ended(2.0, 1, "code 4"), (2.1, KeepersHere(0)), *over(4.0, 1)[1:]],
        ends(2.0, over_at=4.0),
        4,
        culprit=1,
    ),
    "mpirun's words come with --verbose also while the job is being ended": begun_history(
        [ended(2.0, 1, "code 4"), (2.1, MpirunSaid(b"BAD TERMINATION\n")), *over(2.2, 1)],
        ends(2.0, over_at=2.2),
        4,
        culprit=1,
        options={"verbose": True},
    ),
    "mpirun is killed": begun_history(
        [
            *well(1.0, 0),
            ended(2.0, 1, "late signal 15"),
            ended(2.0, 2, "late signal 15"),
            ended(2.0, 3, "late signal 15"),
            *over(2.1, -KILL),
        ],
        closes(2.1),
        73,
        culprit=0,
        cause="left-early",
    ),
}
