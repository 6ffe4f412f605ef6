"""Histories of ranks that fail, are killed, or end with 0 while others run."""

from hvdrun.job.actions import Finish, SignalMpirun
from hvdrun.job.events import (
    HostConnected,
    HostEnded,
    HostShares,
    HostTalks,
    KeeperGone,
    KeepersHere,
    MpirunEnded,
    MpirunOutputEnded,
    MpirunSaid,
    RankEnded,
    RankLeftMpi,
    RankStarted,
)
from tests.launcher.job.histories import (
    IMPROPER,
    KILL,
    LOST_A_PEER,
    TERM,
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
    over,
    well,
)

# MPI has two hosts to start ranks on, and hvdrun has planned ranks 2 and 3 for b.
PLACED = {"job": command(far=frozenset("b"), a=2, b=2)}


def placed(*hosts):
    """The ranks start on these hosts; "": hvdrun's machine."""
    connected = [KeepersHere(2), HostConnected("b"), HostTalks("b")]
    started = [RankStarted(rank, host) for rank, host in enumerate(hosts)]
    return [(0.1, event) for event in (*connected, *started)]


RANKS = {
    "all ranks start where they were planned, and end with 0": History(
        [*placed("", "", "b", "b"), *all_well(2.0)],
        closes(2.1),
        options=PLACED,
    ),
    "MPI starts all ranks on one host": History(
        [*placed("", "", "", ""), *asked(0.2, 0, 1, 2, 3), *over(0.3)],
        ends(0.1, over_at=0.3),
        73,
        cause="mpirun-failed",
        options=PLACED,
    ),
    "MPI takes the hosts for each other": History(
        [*placed("b", "b", "", ""), *asked(0.2, 0, 1, 2, 3), *over(0.3)],
        ends(0.1, over_at=0.3),
        73,
        cause="mpirun-failed",
        options=PLACED,
    ),
    "two hosts are one machine, whose supervisor tells of all ranks": History(
        [
            (0.05, KeepersHere(2)),
            (0.05, HostConnected("b")),
            (0.05, HostShares("b")),
            *((0.1, RankStarted(rank)) for rank in range(4)),
            *all_well(2.0),
        ],
        closes(2.1),
        options=PLACED,
    ),
    "all ranks end with 0": begun_history(
        [*all_well(2.0)],
        closes(2.1),
    ),
    "a rank fails, and the others are ended": begun_history(
        [ended(2.1, 3, "code 3", by=2.0), *asked(2.2, 0, 1, 2), *over(2.5, 1)],
        ends(2.1, over_at=2.5),
        3,
        culprit=3,
    ),
    "the words of the host that failed first come last": begun_history(
        [
            ended(2.0, 0, "code 1"),
            *asked(2.1, 1),
            ended(2.4, 2, "signal 9", by=1.9),
            *asked(2.5, 3),
            *over(2.6, 1),
        ],
        ends(2.0, over_at=2.6),
        137,
        culprit=2,
        cause="rank-killed",
    ),
    "two ranks fail within milliseconds": begun_history(
        [
            ended(2.004, 0, "code 5", by=2.003),
            ended(2.005, 3, "code 6", by=2.001),
            *asked(2.1, 1, 2),
            *over(2.2),
        ],
        ends(2.004, over_at=2.2),
        6,
        culprit=3,
    ),
    "two ranks fail at the same time": begun_history(
        [ended(2.0, 3, "code 6"), ended(2.0, 1, "code 5"), *asked(2.1, 0, 2), *over(2.2)],
        ends(2.0, over_at=2.2),
        5,
        culprit=1,
    ),
    "a rank that MPI had ended before is a consequence": begun_history(
        [
            ended(2.0, 0, "late signal 15"),
            ended(2.2, 3, "code 6", by=2.1),
            *asked(2.3, 1, 2),
            *over(2.4),
        ],
        ends(2.2, over_at=2.4),
        6,
        culprit=3,
    ),
    "the kernel is out of memory": begun_history(
        [ended(2.0, 1, "oom 9"), *asked(2.1, 0, 2, 3), *over(2.2)],
        ends(2.0, over_at=2.2),
        137,
        culprit=1,
        cause="out-of-memory",
    ),
    "a rank dies beside a full /dev/shm": begun_history(
        [
            (2.0, RankEnded(1, f"shm 7 {63 << 20}/{64 << 20}", 2.0)),
            *asked(2.1, 0, 2, 3),
            *over(2.2),
        ],
        ends(2.0, over_at=2.2),
        135,
        culprit=1,
        cause="shared-memory-full",
    ),
    "a keeper is killed": begun_history(
        [(2.0, KeeperGone(0)), *asked(2.1, 1, 2, 3), *over(2.2)],
        ends(2.0, over_at=2.2),
        137,
        culprit=0,
        cause="rank-killed",
    ),
    "a keeper sends nonsense": begun_history(
        [(2.0, KeeperGone(2, "a message of 1073741824 bytes")), *asked(2.1, 0, 1, 3), *over(2.2)],
        ends(2.0, over_at=2.2),
        72,
        culprit=2,
        cause="host-lost",
    ),
    "a keeper ends after its rank": begun_history(
        [*well(2.0, 0, 1, 2, 3), *((2.0, KeeperGone(r)) for r in range(4)), *over(2.1)],
        closes(2.1),
    ),
    "the program is not there": begun_history(
        [ended(0.2, 2, "missing 2"), *asked(0.3, 0, 1, 3), *over(0.5, 1)],
        ends(0.2, over_at=0.5),
        69,
        culprit=2,
        cause="command-not-found",
    ),
    "an agent can't start its rank": begun_history(
        [ended(0.2, 2, "lacks 11"), *asked(0.3, 0, 1, 3), *over(0.5, 1)],
        ends(0.2, over_at=0.5),
        76,
        culprit=2,
        cause="lacks-resource",
    ),
    "mpirun can't open a pipe": History(
        [
            (0.2, MpirunSaid(b"[a:7] PMIX ERROR: PMIX_ERR_SYS_LIMITS_PIPES in file x.c\n")),
            (0.5, MpirunEnded(186)),
            (0.5, MpirunOutputEnded()),
        ],
        closes(0.5),
        76,
        cause="lacks-resource",
        options={"job": command(a=2)},
    ),
    "a rank calls MPI_Abort under MPICH, which kills all without their codes": begun_history(
        [*over(2.0, 7)],
        closes(2.0),
        7,
        culprit=2,
        options={"tails": {0: b"fine\n", 2: b"Abort(7) on node 2 (rank 2 in comm 0)\n"}},
    ),
    "a rank fails, and another one's words are those of an abort": begun_history(
        [ended(2.0, 1, "code 4"), *asked(2.1, 0, 2, 3), *over(2.2, 1)],
        ends(2.0, over_at=2.2),
        4,
        culprit=1,
        options={"tails": {2: b"Abort(7) on node 2 (rank 2 in comm 0)\n"}},
    ),
    "two ranks fail, and say the same": begun_history(
        [ended(2.0, 0, "code 1"), ended(2.1, 2, "code 1"), *asked(2.2, 1, 3), *over(2.3, 1)],
        ends(2.0, over_at=2.3),
        1,
        culprit=0,
        options={"tails": {0: b"no disk\n", 1: b"fine\n", 2: b"no disk\n"}},
    ),
    "ranks ignore TERM": begun_history(
        [ended(2.0, 1, "code 4"), *asked(5.1, 0, 2, 3), *over(5.2, 1)],
        ends(2.0, over_at=5.2),
        4,
        culprit=1,
    ),
    "neither ranks nor mpirun end": begun_history(
        [ended(2.0, 1, "code 4")],
        [*ends(2.0), (6.0, SignalMpirun(TERM)), (7.0, Finish())],
        4,
        culprit=1,
    ),
    "mpirun does not end though the ranks have": begun_history(
        [
            ended(2.0, 1, "code 4"),
            *asked(2.1, 0, 2, 3),
            *((2.2, event) for event in (KeepersHere(0), HostEnded("b", "", 0))),
            (2.75, MpirunEnded(-TERM)),
            (2.75, MpirunOutputEnded()),
        ],
        [*ends(2.0), (2.7, SignalMpirun(TERM)), (2.75, Finish())],
        4,
        culprit=1,
    ),
}

LEFT = {
    "a rank ends with 0 before others have begun": History(
        [
            *begun(0.1, (0, 1)),
            *well(0.2, 0),
            (5.0, RankStarted(2)),
            (5.0, RankStarted(3)),
            *well(6.0, 1, 2, 3),
            *over(6.1),
        ],
        closes(6.1),
    ),
    "a rank ends with 0, and others run on": begun_history(
        [*well(1.0, 0), *well(200.0, 1, 2, 3), *over(200.1)],
        closes(200.1),
    ),
    "os._exit(0) in mid-job": begun_history(
        [*in_mpi(0.5, 0, 1, 2, 3), *well(5.0, 1), *asked(8.1, 0, 2, 3), *over(8.2)],
        ends(8.0, over_at=8.2),
        73,
        culprit=1,
        cause="left-early",
    ),
    "two ranks leave in mid-job, and the second puts off the end": begun_history(
        [*in_mpi(0.5, 0, 1, 2, 3), *well(5.0, 1), *well(7.0, 0), *asked(10.1, 2, 3), *over(10.2)],
        ends(10.0, over_at=10.2),
        73,
        culprit=1,
        cause="left-early",
    ),
    "a rank leaves while no rank that runs is in MPI": begun_history(
        [
            *in_mpi(0.5, 0, 2),
            *well(1.0, 0),
            ended(1.1, 2, "late signal 15"),
            *well(10.0, 1, 3),
            *over(10.1, 1),
        ],
        closes(10.1),
        73,
        culprit=1,
        cause="left-early",
    ),
    "os._exit(0) in mid-job, which Open MPI notices": begun_history(
        [*well(5.0, 1), (5.1, IMPROPER), *well(5.2, 0), *over(5.3, 1)],
        closes(5.3),
        73,
        culprit=1,
        cause="left-early",
    ),
    "os._exit(0) in mid-job, of which an MPI crashes in another rank": begun_history(
        [
            *in_mpi(0.5, 0, 1, 2, 3),
            *well(5.0, 1),
            ended(5.5, 2, "signal 11", by=5.4),
            *over(5.6, 1),
        ],
        ends(5.5, over_at=5.6),
        73,
        culprit=1,
        cause="left-early",
    ),
    "os._exit(0) in mid-job, of which Open MPI ends two ranks and tells one": begun_history(
        [
            *well(5.0, 1),
            (5.1, LOST_A_PEER),
            ended(5.2, 2, "code 14", by=5.1),
            ended(5.2, 0, "code 14"),
            *over(5.3, 1),
        ],
        ends(5.2, over_at=5.3),
        73,
        culprit=1,
        cause="left-early",
    ),
    "a rank ends by itself as others do that lost it": begun_history(
        [
            (5.1, LOST_A_PEER),
            ended(5.2, 2, "code 14", by=5.0),
            ended(5.2, 0, "code 14"),
            *over(5.3, 1),
        ],
        ends(5.2, over_at=5.3),
        14,
        culprit=2,
    ),
    "a rank is killed after os._exit(0) of another": begun_history(
        [*in_mpi(0.5, 0, 1, 2, 3), *well(5.0, 1), ended(5.5, 2, "signal 9", by=5.4), *over(5.6, 1)],
        ends(5.5, over_at=5.6),
        137,
        culprit=2,
        cause="rank-killed",
    ),
    "a rank crashes, and another one ends with 0 because of that": begun_history(
        [
            *in_mpi(0.5, 0, 1, 2, 3),
            ended(5.5, 2, "signal 11", by=5.0),
            *well(5.4, 1),
            *over(5.6, 1),
        ],
        ends(5.5, over_at=5.6),
        139,
        culprit=2,
        cause="rank-killed",
    ),
    "a rank fails with words after os._exit(0) of another": begun_history(
        [*in_mpi(0.5, 0, 1, 2, 3), *well(5.0, 1), ended(5.5, 2, "code 1", by=5.4), *over(5.6, 1)],
        ends(5.5, over_at=5.6),
        1,
        culprit=2,
        options={"tails": {2: b"ValueError: no such file\n"}},
    ),
    "a rank fails of another that left": begun_history(
        [*well(5.0, 1), ended(5.5, 2, "code 9", by=5.4), *over(5.6)],
        ends(5.5, over_at=5.6),
        9,
        culprit=2,
        options={"tails": {2: b"hvdlite.errors.HorovodInternalError: rank 1 on a has left\n"}},
    ),
    "a rank fails by itself, after another ended with 0": begun_history(
        [*well(5.0, 1), ended(5.5, 2, "code 9", by=5.4), *over(5.6)],
        ends(5.5, over_at=5.6),
        9,
        culprit=2,
        options={"tails": {2: b"ValueError: no such file\n"}},
    ),
    "all leave with 0 in mid-job": begun_history(
        [*in_mpi(0.5, 0, 1, 2, 3), *well(5.0, 1), *well(7.9, 0, 2, 3), *over(8.0)],
        ends(7.9, grace_s=0, over_at=8.0),
    ),
    "ranks end with 0 after MPI_Finalize, seconds apart": begun_history(
        [
            *in_mpi(0.5, 0, 1, 2, 3),
            *((5.0, RankLeftMpi(rank)) for rank in range(4)),
            *well(5.0, 0, 1, 2),
            *well(30.0, 3),
            *over(30.1),
        ],
        closes(30.1),
    ),
    "a rank ends with 0 after MPI_Finalize while others are still in MPI": begun_history(
        [
            *in_mpi(0.5, 0, 1, 2, 3),
            (5.0, RankLeftMpi(0)),
            *well(5.0, 0),
            *((30.0, RankLeftMpi(rank)) for rank in (1, 2, 3)),
            *well(30.0, 1, 2, 3),
            *over(30.1),
        ],
        closes(30.1),
    ),
    "mpirun does not end though all ranks have ended with 0": begun_history(
        [*well(2.0, 0, 1, 2, 3), (2.1, KeepersHere(0)), (2.1, HostEnded("b", "", 0))],
        [
            *ends(12.0, grace_s=0),
            (12.5, SignalMpirun(TERM)),
            (13.5, SignalMpirun(KILL)),
            (14.0, Finish()),
        ],
    ),
}
