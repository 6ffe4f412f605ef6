"""Histories of hosts that are silent for a while, and of hvdrun itself not running."""

from hvdrun.job.events import (
    HostBack,
    HostConnected,
    HostEnded,
    HostGaveUp,
    HostQuiet,
    HostSilent,
    HostTalks,
    KeepersHere,
    Paused,
    RankStarted,
)
from tests.launcher.job.histories import (
    History,
    asked,
    begun,
    begun_history,
    closes,
    ended,
    ends,
    over,
    well,
)

OTHERS = [*begun(), (0.1, HostConnected("c")), (0.1, HostTalks("c"))]

SILENCE = {
    "a host is quiet, and comes back": begun_history(
        [
            (10.0, HostQuiet("b", 6.0, 30.0)),
            (14.0, HostBack("b", 10.2)),
            *well(20.0, 0, 1, 2, 3),
            *over(20.0),
        ],
        closes(20.0),
    ),
    "a host comes back just before the end": begun_history(
        [
            (10.0, HostQuiet("b", 6.0, 30.0)),
            (19.9, HostBack("b", 16.0)),
            *well(20.0, 0, 1, 2, 3),
            *over(20.0),
        ],
        closes(20.0),
    ),
    "a host is quiet, and comes back before it is said": begun_history(
        [
            (10.0, HostQuiet("b", 6.0, 30.0)),
            (10.9, HostBack("b", 6.9)),
            *well(20.0, 0, 1, 2, 3),
            *over(20.0),
        ],
        closes(20.0),
    ),
    "a host is quiet again and again": begun_history(
        [
            (10.0, HostQuiet("b", 6.0, 30.0)),
            (11.5, HostBack("b", 7.5)),
            (20.0, HostQuiet("b", 6.0, 30.0)),
            (23.0, HostBack("b", 9.0)),
            *well(30.0, 0, 1, 2, 3),
            *over(30.0),
        ],
        closes(30.0),
    ),
    "a host is quiet, and is lost": begun_history(
        [
            (10.0, HostQuiet("b", 6.0, 30.0)),
            (34.0, HostSilent("b", 30.0, 30.0)),
            *asked(34.2, 0, 1),
            *over(34.3, 1)[::2],
        ],
        ends(34.0, grace_s=2.0),
        72,
        cause="host-lost",
        host="b",
    ),
    "two hosts are quiet, and one is lost before the other": History(
        [
            *OTHERS,
            (10.0, HostQuiet("c", 6.0, 30.0)),
            (10.4, HostQuiet("b", 6.0, 30.0)),
            (34.0, HostSilent("c", 30.0, 30.0)),
            (34.1, KeepersHere(0)),
        ],
        ends(34.0, grace_s=2.0),
        72,
        cause="host-lost",
        host="c",
    ),
    "two hosts come back together": History(
        [
            *OTHERS,
            (10.0, HostQuiet("c", 6.0, 30.0)),
            (10.4, HostQuiet("b", 6.0, 30.0)),
            (14.0, HostBack("b", 9.9)),
            (14.5, HostBack("c", 10.4)),
            *well(20.0, 0, 1, 2, 3),
            *over(20.0),
            (20.0, HostEnded("c", "", 0)),
        ],
        closes(20.0),
    ),
    "hvdrun did not run for a while": begun_history(
        [(18.0, Paused(8.0)), *well(20.0, 0, 1, 2, 3), *over(20.0)],
        closes(20.0),
    ),
    "hvdrun did not run for so long that a host ended its ranks, and others failed": begun_history(
        [
            (50.0, Paused(40.0)),
            ended(50.0, 0, "late signal 15", by=43.0),
            ended(50.0, 1, "code 14", by=43.0),
            (50.0, HostGaveUp("b", 30.0, 40.5)),
            *asked(50.1, 2, 3),
            *over(50.2, 1),
        ],
        ends(50.0, over_at=50.2),
        72,
        cause="host-lost",
        host="b",
    ),
    "hvdrun did not run for so long that connections ended": History(
        [
            *OTHERS,
            (50.0, Paused(40.0)),
            (50.0, HostEnded("c")),
            (50.1, HostGaveUp("b", 30.0, 40.5)),
            *asked(50.1, 0, 1, 2, 3),
            *over(50.2, 1),
        ],
        ends(50.0, over_at=50.2),
        72,
        cause="host-lost",
        host="b",
    ),
    "hvdrun did not run, and a connection ended meanwhile": begun_history(
        [(50.0, Paused(40.0)), (52.0, HostEnded("b")), *asked(52.1, 0, 1), *over(52.2, 1)[::2]],
        ends(52.0),
        72,
        cause="host-lost",
        host="b",
    ),
    "a host hears nothing from hvdrun, which runs": begun_history(
        [
            (2.0, Paused(4.0)),
            (40.5, HostGaveUp("b", 30.0, 40.4)),
            *asked(41.0, 0, 1, 2, 3),
            *over(41.0, 1),
        ],
        ends(40.5, grace_s=2.0, over_at=41.0),
        72,
        cause="host-lost",
        host="b",
    ),
    "a rank fails, and then a host ends its ranks as hvdrun does not run": begun_history(
        [
            (50.0, Paused(40.0)),
            (50.0, HostGaveUp("b", 30.0, 40.5)),
            ended(50.0, 1, "code 3", by=12.0),
            *asked(50.1, 0, 2, 3),
            *over(50.2, 1),
        ],
        ends(50.0, grace_s=2.0, over_at=50.2),
        3,
        culprit=1,
    ),
    "all ranks have ended, and then a host hears nothing more from hvdrun": begun_history(
        [
            (50.0, Paused(40.0)),
            *well(50.0, 0, 1, 2, 3),
            (50.0, HostGaveUp("b", 30.0, 40.5)),
            *over(50.2),
        ],
        ends(50.0, grace_s=2.0, over_at=50.2),
    ),
    "hvdrun did not run while the ranks started": History(
        [
            *begun(0.1, (0, 1)),
            (59.0, Paused(40.0)),
            (76.0, RankStarted(2)),
            (76.0, RankStarted(3)),
            *well(80.0, 0, 1, 2, 3),
            *over(80.0),
        ],
        closes(80.0),
    ),
}
