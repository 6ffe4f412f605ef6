"""Histories of hosts that are silent, break off or never connect."""

from hvdrun.job.actions import Finish, HangUp
from hvdrun.job.events import (
    HostConnected,
    HostEnded,
    HostSilent,
    HostTalks,
    KeepersHere,
    MpirunEnded,
    MpirunOutputEnded,
    MpirunSaid,
    RankStarted,
    SshSaid,
)
from tests.launcher.job.histories import (
    LOST_A_PEER,
    History,
    asked,
    begun,
    begun_history,
    command,
    ended,
    ends,
    over,
    well,
)

# Both talk, and all ranks have started.
TWO_FAR_HOSTS = [*begun(), (0.2, HostConnected("c")), (0.2, HostTalks("c")), (0.2, RankStarted(4))]
CLOSED = b"Connection to c closed by remote host.\n"

LOST_C = MpirunSaid(
    b"PRTE has lost communication with a remote daemon.\n\n"
    b"  HNP daemon   : [prterun-a-11@0,0] on node a\n"
    b"  Remote daemon: [prterun-a-11@0,2] on node c\n\nThis is usually due to\n"
)
SSH_TO_C_FAILED = MpirunSaid(
    b"A daemon failed to report back after being spawned. This could\n"
    b"back to prterun:\n\n  Local host:    a\n  Remote host:   c\n  Daemon exit status: 255\n"
)


def mpirun_names_c(said, *events, **expected):
    """It ends its ssh to b before that to c says a word."""
    return History(
        [*TWO_FAR_HOSTS, (8.9, said), (9.0, HostEnded("b")), *events, *asked(9.2, 0, 1)],
        ends(9.0),
        72,
        cause="host-lost",
        options={"job": command(a=2, b=2, c=1)},
        **expected,
    )


HOSTS = {
    "mpirun says which host is lost": mpirun_names_c(
        LOST_C,
        (9.0, HostEnded("c")),
        host="c",
    ),
    "mpirun says to which host ssh has failed": mpirun_names_c(
        SSH_TO_C_FAILED,
        (9.0, HostEnded("c")),
        host="c",
    ),
    "mpirun says first to which host ssh has failed": mpirun_names_c(
        MpirunSaid(SSH_TO_C_FAILED.text + LOST_C.text.replace(b"node c", b"node b")),
        (9.0, HostEnded("c")),
        host="c",
    ),
    "both mpirun and ssh say which host is lost": mpirun_names_c(
        LOST_C,
        (9.1, SshSaid("c", CLOSED)),
        (9.1, HostEnded("c")),
        host="c",
    ),
    "mpirun names a host that is none of the job": mpirun_names_c(
        MpirunSaid(LOST_C.text.replace(b"node c", b"node d")),
        (9.0, HostEnded("c")),
        host="b",
    ),
    "mpirun ends its ssh to a host because another one is lost": History(
        [
            *TWO_FAR_HOSTS,
            (9.0, HostEnded("b")),
            (9.1, SshSaid("c", CLOSED)),
            (9.1, HostEnded("c")),
            *asked(9.2, 0, 1),
        ],
        ends(9.0),
        72,
        cause="host-lost",
        host="c",
        options={"job": command(a=2, b=2, c=1)},
    ),
    "what ssh said before the host talked is not why it ended": begun_history(
        [
            (0.2, HostConnected("c")),
            (0.2, SshSaid("c", b"Warning: Permanently added 'c' to the list of known hosts.\n")),
            (0.3, HostTalks("c")),
            (0.3, RankStarted(4)),
            (9.0, HostEnded("b")),
            (9.1, HostEnded("c")),
            *asked(9.2, 0, 1),
        ],
        ends(9.0),
        72,
        cause="host-lost",
        host="b",
        options={"job": command(a=2, b=2, c=1)},
    ),
    "a connection ends without a word, and another one much later": History(
        [
            *TWO_FAR_HOSTS,
            (9.0, HostEnded("b")),
            (10.1, SshSaid("c", CLOSED)),
            (10.1, HostEnded("c")),
            *asked(10.2, 0, 1),
        ],
        ends(9.0),
        72,
        cause="host-lost",
        host="b",
        options={"job": command(a=2, b=2, c=1)},
    ),
    "a host whose agent has ended in order is not the one that is lost": History(
        [
            *TWO_FAR_HOSTS,
            (9.0, HostEnded("b")),
            (9.1, SshSaid("c", CLOSED)),
            (9.1, HostEnded("c", "", 0)),
            *asked(9.2, 0, 1),
        ],
        ends(9.0),
        72,
        cause="host-lost",
        host="b",
        options={"job": command(a=2, b=2, c=1)},
    ),
    "a host is silent": begun_history(
        [(10.0, HostSilent("b", 30.2, 30.0)), *asked(10.2, 0, 1), *over(10.3, 1)[::2]],
        ends(10.0, grace_s=2.0),
        72,
        cause="host-lost",
        host="b",
    ),
    "a connection ends": begun_history(
        [
            (9.9, SshSaid("b", b"Connection to b closed.\n")),
            (10.0, HostEnded("b")),
            *asked(10.2, 0, 1),
        ],
        ends(10.0),
        72,
        cause="host-lost",
        host="b",
    ),
    "ssh does not get through": History(
        [
            (0.1, HostConnected("b")),
            (0.5, SshSaid("b", b"ssh: connect to host b port 22: Connection refused\n")),
            (0.5, HostEnded("b")),
        ],
        ends(0.5),
        70,
        cause="ssh-failed",
        host="b",
    ),
    "the agent of a host can't start MPI's daemon": History(
        [(0.1, HostConnected("b")), (0.2, HostTalks("b")), (0.5, HostEnded("b", "lacks 24"))],
        ends(0.5),
        76,
        cause="lacks-resource",
    ),
    "another user holds the socket of a host": History(
        [(0.1, HostConnected("b")), (0.2, HostTalks("b")), (0.5, HostEnded("b", "ann has it"))],
        ends(0.5),
        71,
        cause="host-not-ready",
        host="b",
    ),
    "MPI's daemon can't start": History(
        [
            (0.1, HostConnected("b")),
            (0.2, HostTalks("b")),
            (0.3, MpirunSaid(b"orted: not found\n")),
            (0.4, HostEnded("b", "", 127, b"orted: not found\n")),
        ],
        ends(0.4),
        71,
        cause="host-not-ready",
        host="b",
    ),
    "MPI's daemon fails after ranks have started, and mpirun says the rest": begun_history(
        [
            (1.0, HostEnded("b", "", 1)),
            ended(1.1, 0, "code 9", by=1.0),
            (1.1, KeepersHere(0)),
            (1.2, MpirunEnded(1)),
            (1.2, MpirunOutputEnded()),
        ],
        ends(1.1, over_at=1.2),
        9,
        culprit=0,
    ),
    "a rank fails, and a host is lost without a report": begun_history(
        [(2.0, LOST_A_PEER), ended(2.0, 0, "code 14"), *over(2.1, 14)],
        ends(2.0, over_at=2.1),
        72,
        cause="host-lost",
        host="b",
    ),
    "a rank fails of one that was killed and whose shim MPI had ended": begun_history(
        [
            ended(2.0, 2, "late signal 9", by=1.9),
            (2.0, LOST_A_PEER),
            ended(2.0, 0, "code 14"),
            *over(2.1, 14),
        ],
        ends(2.0, over_at=2.1),
        137,
        culprit=2,
        cause="rank-killed",
    ),
    "a rank fails of one that left with 0": begun_history(
        [*well(1.9, 2), (2.0, LOST_A_PEER), ended(2.0, 0, "code 14"), *over(2.1, 14)],
        ends(2.0, over_at=2.1),
        73,
        culprit=2,
        cause="left-early",
    ),
    "a host is silent while the job is ended for another reason": begun_history(
        [
            ended(2.0, 1, "code 4"),
            (2.5, HostSilent("b", 30.0, 30.0)),
            (2.6, KeepersHere(0)),
            (2.6, MpirunEnded(1)),
            (2.6, MpirunOutputEnded()),
        ],
        ends(2.0, over_at=2.6),
        4,
        culprit=1,
    ),
    "a host comes up while the job is being ended": History(
        [
            (0.1, KeepersHere(2)),
            (0.1, RankStarted(0)),
            ended(0.2, 0, "code 4"),
            (0.3, HostConnected("b")),
            *over(0.5, 1),
        ],
        [*ends(0.2), (0.3, HangUp("b")), (0.5, Finish())],
        4,
        culprit=0,
    ),
    "ranks do not start in time": History(
        [
            *begun(0.1, (0, 1)),
            (30.0, HostEnded("b", "", 0)),
            (30.0, HostConnected("b")),
            (30.0, SshSaid("b", b"debug\nwaiting\n")),
        ],
        ends(60.0),
        75,
        cause="start-timeout",
    ),
}
