"""Histories of mpirun: it fails, hangs or ends early."""

from hvdrun.job.actions import EndAll, EndHosts, Finish
from hvdrun.job.events import (
    HostEnded,
    KeepersHere,
    MpirunEnded,
    MpirunOutputEnded,
    MpirunSaid,
    RankEnded,
)
from tests.launcher.job.histories import (
    KILL,
    History,
    asked,
    begun,
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
        [(0.2, EndHosts(3.0)), (0.2, Finish())],
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
        [(0.2, EndHosts(3.0)), (0.2, Finish())],
        73,
        cause="mpirun-failed",
    ),
    "mpirun prints an empty line and fails": History(
        [(0.1, MpirunSaid(b"\n")), (0.2, MpirunEnded(1)), (0.2, MpirunOutputEnded())],
        [(0.2, EndHosts(3.0)), (0.2, Finish())],
        73,
        cause="mpirun-failed",
    ),
    "mpirun fails and prints nothing": History(
        [(0.2, MpirunEnded(-11)), (0.2, MpirunOutputEnded())],
        [(0.2, EndHosts(3.0)), (0.2, Finish())],
        73,
        cause="mpirun-failed",
    ),
    "mpirun is told to do something else": History(
        [(0.1, MpirunSaid(b"mpirun 5\n")), (0.9, MpirunEnded(0)), (0.9, MpirunOutputEnded())],
        [(0.9, EndHosts(3.0)), (0.9, Finish())],
        0,
    ),
    "mpirun's words come at once with --verbose": History(
        [(0.1, MpirunSaid(b"mpirun 5\n")), (0.9, MpirunEnded(0)), (0.9, MpirunOutputEnded())],
        [(0.9, EndHosts(3.0)), (0.9, Finish())],
        0,
        options={"verbose": True},
    ),
    "mpirun's words about a rank's failure are not shown": History(
        [
            *begun(),
            (2.0, MpirunSaid(b"BAD TERMINATION\n")),
            (2.1, RankEnded(1, "code 4", 2.0)),
            *over(9.0),
        ],
        ends(2.1),
        4,
        culprit=1,
    ),
    "a host's words come after mpirun's end": History(
        [
            *begun(),
            (2.0, MpirunEnded(1)),
            (2.0, MpirunOutputEnded()),
            (3.5, RankEnded(2, "code 7", 1.9)),
            (3.6, HostEnded("b", "", 1)),
            (3.6, KeepersHere(0)),
        ],
        [(2.0, EndHosts(3.0)), (3.5, EndAll(3.0)), (3.6, Finish())],
        7,
        culprit=2,
    ),
    "a host's words come more than 2 s after mpirun's end": History(
        [
            *begun(),
            (2.0, MpirunEnded(1)),
            (2.0, MpirunOutputEnded()),
            (4.5, RankEnded(2, "code 7", 1.9)),
            (4.6, HostEnded("b", "", 1)),
            (4.6, KeepersHere(0)),
        ],
        [(2.0, EndHosts(3.0)), (4.0, EndAll(3.0)), (4.6, Finish())],
        73,
        culprit=0,
        cause="mpirun-failed",
    ),
    "mpirun ends with 0 while ranks have not reported": History(
        [
            *begun(),
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
    "mpirun ends, and its daemon keeps its output open": History(
        [
            *begun(),
            *well(1.0, 0, 1, 2, 3),
            *over(1.1)[:-1],
            (1.5, MpirunSaid(b"[a:1] a daemon's line\n")),
            (1.6, MpirunOutputEnded()),
        ],
        [(1.1, EndHosts(3.0)), (1.6, Finish())],
        0,
    ),
    "mpirun closes its output, and ends later": History(
        [
            *begun(),
            *well(1.0, 0, 1, 2, 3),
            (1.0, MpirunOutputEnded()),
            *over(1.5)[:-1],
        ],
        [(1.5, EndHosts(3.0)), (1.5, Finish())],
        0,
    ),
    "keepers of this host are there after mpirun and the other host": History(
        [
            *begun(),
            *well(1.0, 0, 1, 2, 3),
            *over(1.1)[1:],
            (1.7, KeepersHere(0)),
        ],
        [(1.1, EndHosts(3.0)), (1.7, Finish())],
        0,
    ),
    "mpirun is not helped while a keeper of this host is there": History(
        [
            *begun(),
            (2.0, RankEnded(1, "code 4", 2.0)),
            (2.1, HostEnded("b", "", 1)),
            *over(4.0, 1)[:1],
            *over(4.1, 1)[2:],
        ],
        ends(2.0, over_at=4.1),
        4,
        culprit=1,
    ),
    "mpirun is not helped while another host is there": History(
        [
            *begun(),
            (2.0, RankEnded(1, "code 4", 2.0)),
            (2.1, KeepersHere(0)),
            *over(4.0, 1)[1:],
        ],
        ends(2.0, over_at=4.0),
        4,
        culprit=1,
    ),
    "mpirun's words come with --verbose also while the job is being ended": History(
        [
            *begun(),
            (2.0, RankEnded(1, "code 4", 2.0)),
            (2.1, MpirunSaid(b"BAD TERMINATION\n")),
            *over(2.2, 1),
        ],
        ends(2.0, over_at=2.2),
        4,
        culprit=1,
        options={"verbose": True},
    ),
    "mpirun is killed": History(
        [
            *begun(),
            *well(1.0, 0),
            (2.0, RankEnded(1, "late signal 15", 2.0)),
            (2.0, RankEnded(2, "late signal 15", 2.0)),
            (2.0, RankEnded(3, "late signal 15", 2.0)),
            *over(2.1, -KILL),
        ],
        [(2.1, EndHosts(3.0)), (2.1, Finish())],
        73,
        culprit=0,
        cause="left-early",
    ),
}
