"""Histories of jobs: what happens when, what hvdrun does, and its verdict.

Unless it says otherwise, a job has ranks 0 and 1 on this host, a, and 2 and 3 on b.
"""

import json
from dataclasses import dataclass, field

from hvdrun.errors import (
    CommandNotFound,
    HostLost,
    HostSetupError,
    LacksResource,
    MpirunFailed,
    SshFailed,
    StartTimeout,
)
from hvdrun.job.actions import EndAll, EndHosts, Finish, HangUp, SignalMpirun
from hvdrun.job.course import Course
from hvdrun.job.events import (
    HostConnected,
    HostEnded,
    HostSilent,
    HostTalks,
    KeeperGone,
    KeepersHere,
    MpirunEnded,
    MpirunOutputEnded,
    MpirunSaid,
    RankEnded,
    RankInMpi,
    RankLeftMpi,
    RankLooked,
    RankSaid,
    RankStarted,
    SshSaid,
    TimePassed,
)
from hvdrun.job.supervision import Supervision
from hvdrun.job.verdict import reach
from hvdrun.machine import notes
from hvdrun.machine.notes import INIT_BEGUN
from hvdrun.plan.command import Command
from hvdrun.plan.hosts import Host, Share

HUP, INT, QUIT, KILL, USR1, PIPE, TERM = 1, 2, 3, 9, 10, 13, 15
DAYS_S = 2e5


def command(environment=None, **hosts):
    shares = tuple(Share(Host(name), count) for name, count in hosts.items())
    rest = {
        "environment": environment or {},
        "added": (),
        "passed": (),
        "connections": (),
        "notes": (),
    }
    return Command(
        starter="mpirun",
        argv=("/bin/mpirun",),
        shares=shares,
        explanations=(),
        program="train.py",
        python="/venv/bin/python",
        **rest,
    )


def play(events, job=None, start_timeout_s=60.0, verbose=False, tails=None, grace_s=None):
    """The course after these events, and its actions with their times. It is woken at each
    `wake_at`, also after the last event, for some days: while ranks wait in init, hvdrun reports it
    again and again."""
    course = Course(
        job or command(a=2, b=2), 0.0, Supervision(start_timeout_s, verbose, grace_s=grace_s)
    )
    actions = []

    def tell(now, event):
        actions.extend((round(now, 3), action) for action in course.on(now, event))

    def sleep(until):
        while (at := course.wake_at()) is not None and at <= until:
            tell(at, TimePassed())
            assert (next_at := course.wake_at()) is None or next_at > at, "it would not sleep"

    for at, event in events:
        sleep(at)
        if course.finished:
            break
        tell(at, event)
        tell(at, TimePassed())
    sleep(DAYS_S)
    now = actions[-1][0] if actions else 0.0
    return course, actions, reach(course, now, 1e9 + now, tails or {})


def begun(at=0.1, ranks=(0, 1, 2, 3)):
    """Both hosts have connected, and these ranks have started."""
    events = [KeepersHere(2), HostConnected("b"), HostTalks("b"), *map(RankStarted, ranks)]
    return [(at, event) for event in events]


def asked(at, *ranks):
    """They end as hvdrun told them to."""
    return [(at, RankEnded(rank, "asked signal 15", at)) for rank in ranks]


def well(at, *ranks):
    return [(at, RankEnded(rank, "code 0", at)) for rank in ranks]


def in_mpi(at, *ranks):
    return [(at, RankInMpi(rank)) for rank in ranks]


def init(at, *ranks, kind=INIT_BEGUN):
    return [(at, RankSaid(rank, kind)) for rank in ranks]


def seen(at, rank, cpu_s=0.0, state="S", children=(), by=None):
    """A keeper's answer about a rank that runs train.py, by its host's clock."""
    processes = [[100 + rank, 1, state, cpu_s, "python train.py", False], *children]
    look = json.dumps({"at": at if by is None else by, "processes": processes}).encode()
    return [(at, RankLooked(rank, look))]


def over(at, code=0):
    """Nothing is left on any host, and mpirun ends too."""
    events = [KeepersHere(0), HostEnded("b", "", 0), MpirunEnded(code), MpirunOutputEnded()]
    return [(at, event) for event in events]


def ends(at, grace_s=3.0, over_at=None, first=TERM):
    """hvdrun ends all ranks; later, if a time is given, mpirun and everything else have ended."""
    done = [(at, EndAll(grace_s, first))]
    if over_at is not None:
        done += [(over_at, Finish())]
    return done


@dataclass
class History:
    events: list
    actions: list  # all but Say and Release
    code: int
    culprit: int | None = None
    error: type | None = None
    words: tuple = ()  # of the report or the error
    says: list = field(default_factory=list)  # how the Says begin, with their times
    options: dict = field(default_factory=dict)
    lacks: tuple = ()  # what the report does not say


LOST_A_PEER = MpirunSaid(
    b"[a:00000] *** reported by process [3216572417,0]\n[a:00000] *** on a NULL communicator\n"
)
IMPROPER = MpirunSaid(b"process rank 1 with PID 7 on node a exiting\nimproperly. There are\n")
ILL_LUCK = MpirunSaid(b"The PMIx server's listener thread failed to start. We cannot\n")

RANKS = {
    "all ranks end with 0": History(
        [*begun(), *well(2.0, 0, 1, 2, 3), *over(2.1)],
        [(2.1, EndHosts(3.0)), (2.1, Finish())],
        0,
    ),
    "ranks send what they have measured, and one sends nonsense": History(
        [
            *begun(),
            (1.9, RankSaid(0, notes.SUMMARY, b'{"steps": 3, "seconds": 2, "waited": 1}')),
            (1.9, RankSaid(2, notes.SUMMARY, b'{"steps": 3}')),
            *well(2.0, 0, 1, 2, 3),
            *over(2.1),
        ],
        [(2.1, EndHosts(3.0)), (2.1, Finish())],
        0,
        words=("hvdrun: 3 steps (of 1 of 4 ranks), 1000 ms each; communication took 50 %",),
    ),
    "a rank fails, and the others are ended": History(
        [
            *begun(),
            (2.1, RankEnded(3, "code 3", 2.0)),
            *asked(2.2, 0, 1, 2),
            *over(2.5, 1),
        ],
        ends(2.1, over_at=2.5),
        3,
        culprit=3,
        words=("rank 3 on b ended with exit code 3 after 2.0 s", "the other 3 ranks were ended"),
    ),
    "the words of the host that failed first come last": History(
        [
            *begun(),
            (2.0, RankEnded(0, "code 1", 2.0)),
            *asked(2.1, 1),
            (2.4, RankEnded(2, "signal 9", 1.9)),
            *asked(2.5, 3),
            *over(2.6, 1),
        ],
        ends(2.0, over_at=2.6),
        137,
        culprit=2,
        words=("rank 2 on b was ended by SIGKILL",),
    ),
    "two ranks fail within milliseconds": History(
        [
            *begun(),
            (2.004, RankEnded(0, "code 5", 2.003)),
            (2.005, RankEnded(3, "code 6", 2.001)),
            *asked(2.1, 1, 2),
            *over(2.2),
        ],
        ends(2.004, over_at=2.2),
        6,
        culprit=3,
    ),
    "two ranks fail at the same time": History(
        [
            *begun(),
            (2.0, RankEnded(3, "code 6", 2.0)),
            (2.0, RankEnded(1, "code 5", 2.0)),
            *asked(2.1, 0, 2),
            *over(2.2),
        ],
        ends(2.0, over_at=2.2),
        5,
        culprit=1,
    ),
    "a rank that MPI had ended before is a consequence": History(
        [
            *begun(),
            (2.0, RankEnded(0, "late signal 15", 2.0)),
            (2.2, RankEnded(3, "code 6", 2.1)),
            *asked(2.3, 1, 2),
            *over(2.4),
        ],
        ends(2.2, over_at=2.4),
        6,
        culprit=3,
    ),
    "the kernel is out of memory": History(
        [*begun(), (2.0, RankEnded(1, "oom 9", 2.0)), *asked(2.1, 0, 2, 3), *over(2.2)],
        ends(2.0, over_at=2.2),
        137,
        culprit=1,
        words=(
            "rank 1 on a was ended by SIGKILL (Killed), sent by the kernel's out-of-memory killer",
        ),
    ),
    "a rank dies beside a full /dev/shm": History(
        [
            *begun(),
            (2.0, RankEnded(1, f"shm 7 {63 << 20}/{64 << 20}", 2.0)),
            *asked(2.1, 0, 2, 3),
            *over(2.2),
        ],
        ends(2.0, over_at=2.2),
        135,
        culprit=1,
        words=(
            "rank 1 on a was ended by SIGBUS (Bus error) beside a full /dev/shm",
            "(63 MiB of 64 MiB used) after 2.0 s",
            "see what fills it on a (`ls -l /dev/shm`)",
            "--shm-size=1g",
        ),
    ),
    "a keeper is killed": History(
        [*begun(), (2.0, KeeperGone(0)), *asked(2.1, 1, 2, 3), *over(2.2)],
        ends(2.0, over_at=2.2),
        137,
        culprit=0,
        words=("rank 0 on a was ended by SIGKILL",),
    ),
    "a keeper ends after its rank": History(
        [
            *begun(),
            *well(2.0, 0, 1, 2, 3),
            *((2.0, KeeperGone(r)) for r in range(4)),
            *over(2.1),
        ],
        [(2.1, EndHosts(3.0)), (2.1, Finish())],
        0,
    ),
    "the program is not there": History(
        [*begun(), (0.2, RankEnded(2, "missing 2", 0.2)), *asked(0.3, 0, 1, 3), *over(0.5, 1)],
        ends(0.2, over_at=0.5),
        69,
        error=CommandNotFound,
        words=("'train.py' was not found on b (rank 2)",),
    ),
    "an agent can't start its rank": History(
        [*begun(), (0.2, RankEnded(2, "lacks 11", 0.2)), *asked(0.3, 0, 1, 3), *over(0.5, 1)],
        ends(0.2, over_at=0.5),
        76,
        error=LacksResource,
        words=("rank 2 was not started: hvdrun on b can't start any more processes or threads;",),
    ),
    "mpirun can't open a pipe": History(
        [
            (0.2, MpirunSaid(b"[a:7] PMIX ERROR: PMIX_ERR_SYS_LIMITS_PIPES in file x.c\n")),
            (0.5, MpirunEnded(186)),
            (0.5, MpirunOutputEnded()),
        ],
        [(0.5, EndHosts(3.0)), (0.5, Finish())],
        76,
        error=LacksResource,
        words=("mpirun can't open any more files; raise that limit (`ulimit -n 4096`;",),
        options={"job": command(a=2)},
    ),
    "a rank calls MPI_Abort under MPICH, which kills all without their codes": History(
        [*begun(), *over(2.0, 7)],
        [(2.0, EndHosts(3.0)), (2.0, Finish())],
        7,
        culprit=2,
        options={"tails": {0: b"fine\n", 2: b"Abort(7) on node 2 (rank 2 in comm 0)\n"}},
    ),
    "a rank fails, and another one's words are those of an abort": History(
        [*begun(), (2.0, RankEnded(1, "code 4", 2.0)), *asked(2.1, 0, 2, 3), *over(2.2, 1)],
        ends(2.0, over_at=2.2),
        4,
        culprit=1,
        options={"tails": {2: b"Abort(7) on node 2 (rank 2 in comm 0)\n"}},
    ),
    "two ranks fail, and say the same": History(
        [
            *begun(),
            (2.0, RankEnded(0, "code 1", 2.0)),
            (2.1, RankEnded(2, "code 1", 2.1)),
            *asked(2.2, 1, 3),
            *over(2.3, 1),
        ],
        ends(2.0, over_at=2.3),
        1,
        culprit=0,
        words=("its last lines on stderr (the same on ranks 0,2):\n    no disk",),
        options={"tails": {0: b"no disk\n", 1: b"fine\n", 2: b"no disk\n"}},
    ),
    "ranks ignore TERM": History(
        [*begun(), (2.0, RankEnded(1, "code 4", 2.0)), *asked(5.1, 0, 2, 3), *over(5.2, 1)],
        ends(2.0, over_at=5.2),
        4,
        culprit=1,
    ),
    "neither ranks nor mpirun end": History(
        [*begun(), (2.0, RankEnded(1, "code 4", 2.0))],
        [
            *ends(2.0),
            (6.0, SignalMpirun(TERM)),
            (7.0, Finish()),
        ],
        4,
        culprit=1,
    ),
    "mpirun does not end though the ranks have": History(
        [
            *begun(),
            (2.0, RankEnded(1, "code 4", 2.0)),
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
        [(6.1, EndHosts(3.0)), (6.1, Finish())],
        0,
    ),
    "a rank ends with 0, and others run on": History(
        [*begun(), *well(1.0, 0), *well(200.0, 1, 2, 3), *over(200.1)],
        [(200.1, EndHosts(3.0)), (200.1, Finish())],
        0,
        says=[(61.0, "hvdrun: rank 0 on a ended with exit code 0 1 min 00 s ago, and 3 other")],
    ),
    "os._exit(0) in mid-job": History(
        [
            *begun(),
            *in_mpi(0.5, 0, 1, 2, 3),
            *well(5.0, 1),
            *asked(8.1, 0, 2, 3),
            *over(8.2),
        ],
        ends(8.0, over_at=8.2),
        73,
        error=MpirunFailed,
        words=("rank 1 on a ended with exit code 0 after 5.0 s, in mid-job",),
    ),
    "two ranks leave in mid-job, and the second puts off the end": History(
        [
            *begun(),
            *in_mpi(0.5, 0, 1, 2, 3),
            *well(5.0, 1),
            *well(7.0, 0),
            *asked(10.1, 2, 3),
            *over(10.2),
        ],
        ends(10.0, over_at=10.2),
        73,
        error=MpirunFailed,
        words=("rank 1 on a ended with exit code 0 after 5.0 s, in mid-job",),
    ),
    "a rank leaves while no rank that runs is in MPI": History(
        [
            *begun(),
            *in_mpi(0.5, 0, 2),
            *well(1.0, 0),
            (1.1, RankEnded(2, "late signal 15", 1.1)),
            *well(10.0, 1, 3),
            *over(10.1, 1),
        ],
        [(10.1, EndHosts(3.0)), (10.1, Finish())],
        73,
        error=MpirunFailed,
        words=("ended with exit code 0 after 10.0 s, in mid-job",),
    ),
    "os._exit(0) in mid-job, which Open MPI notices": History(
        [*begun(), *well(5.0, 1), (5.1, IMPROPER), *well(5.2, 0), *over(5.3, 1)],
        [(5.3, EndHosts(3.0)), (5.3, Finish())],
        73,
        error=MpirunFailed,
        words=("rank 1 on a ended with exit code 0 after 5.0 s, in mid-job",),
    ),
    "a rank fails of another that left": History(
        [*begun(), *well(5.0, 1), (5.5, RankEnded(2, "code 9", 5.4)), *over(5.6)],
        ends(5.5, over_at=5.6),
        9,
        culprit=2,
        words=("rank 2 on b ended with exit code 9", "rank 1 on a had ended with exit code 0"),
        options={"tails": {2: b"hvdlite.errors.HorovodInternalError: rank 1 on a has left\n"}},
    ),
    "a rank fails by itself, after another ended with 0": History(
        [*begun(), *well(5.0, 1), (5.5, RankEnded(2, "code 9", 5.4)), *over(5.6)],
        ends(5.5, over_at=5.6),
        9,
        culprit=2,
        words=("rank 2 on b ended with exit code 9",),
        options={"tails": {2: b"ValueError: no such file\n"}},
        lacks=("had ended with exit code 0",),
    ),
    "all leave with 0 in mid-job": History(
        [*begun(), *in_mpi(0.5, 0, 1, 2, 3), *well(5.0, 1), *well(7.9, 0, 2, 3), *over(8.0)],
        ends(7.9, grace_s=0, over_at=8.0),
        0,
    ),
    "ranks end with 0 after MPI_Finalize, seconds apart": History(
        [
            *begun(),
            *in_mpi(0.5, 0, 1, 2, 3),
            *((5.0, RankLeftMpi(rank)) for rank in range(4)),
            *well(5.0, 0, 1, 2),
            *well(30.0, 3),
            *over(30.1),
        ],
        [(30.1, EndHosts(3.0)), (30.1, Finish())],
        0,
    ),
    "a rank ends with 0 after MPI_Finalize while others are still in MPI": History(
        [
            *begun(),
            *in_mpi(0.5, 0, 1, 2, 3),
            (5.0, RankLeftMpi(0)),
            *well(5.0, 0),
            *((30.0, RankLeftMpi(rank)) for rank in (1, 2, 3)),
            *well(30.0, 1, 2, 3),
            *over(30.1),
        ],
        [(30.1, EndHosts(3.0)), (30.1, Finish())],
        0,
    ),
    "mpirun does not end though all ranks have ended with 0": History(
        [*begun(), *well(2.0, 0, 1, 2, 3), (2.1, KeepersHere(0)), (2.1, HostEnded("b", "", 0))],
        [
            *ends(12.0, grace_s=0),
            (12.5, SignalMpirun(TERM)),
            (13.5, SignalMpirun(KILL)),
            (14.0, Finish()),
        ],
        0,
    ),
}

HOSTS = {
    "a host is silent": History(
        [*begun(), (10.0, HostSilent("b", 30.2, 30.0)), *asked(10.2, 0, 1), *over(10.3, 1)[::2]],
        ends(10.0, grace_s=2.0),
        72,
        error=HostLost,
        words=("b is lost: it has given no sign of life for 30 s, and the limit is 30 s (--host-",),
    ),
    "a connection ends": History(
        [
            *begun(),
            (9.9, SshSaid("b", b"Connection to b closed.\n")),
            (10.0, HostEnded("b")),
            *asked(10.2, 0, 1),
        ],
        ends(10.0),
        72,
        error=HostLost,
        words=("b is lost: the connection to it was closed (Connection to b closed.)",),
    ),
    "ssh does not get through": History(
        [
            (0.1, HostConnected("b")),
            (0.5, SshSaid("b", b"ssh: connect to host b port 22: Connection refused\n")),
            (0.5, HostEnded("b")),
        ],
        ends(0.5),
        70,
        error=SshFailed,
        words=("b can't be reached by ssh",),
    ),
    "the agent of a host can't start MPI's daemon": History(
        [(0.1, HostConnected("b")), (0.2, HostTalks("b")), (0.5, HostEnded("b", "lacks 24"))],
        ends(0.5),
        76,
        error=LacksResource,
        words=("hvdrun's agent on b can't open any more files;",),
    ),
    "another user holds the socket of a host": History(
        [(0.1, HostConnected("b")), (0.2, HostTalks("b")), (0.5, HostEnded("b", "ann has it"))],
        ends(0.5),
        71,
        error=HostSetupError,
        words=("b can't run ranks: ann has it",),
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
        error=HostSetupError,
        words=("MPI's daemon ended there with exit code 127: orted: not found",),
    ),
    "MPI's daemon fails after ranks have started, and mpirun says the rest": History(
        [
            *begun(),
            (1.0, HostEnded("b", "", 1)),
            (1.1, RankEnded(0, "code 9", 1.0)),
            (1.1, KeepersHere(0)),
            (1.2, MpirunEnded(1)),
            (1.2, MpirunOutputEnded()),
        ],
        ends(1.1, over_at=1.2),
        9,
        culprit=0,
    ),
    "a rank fails, and a host is lost without a report": History(
        [*begun(), (2.0, LOST_A_PEER), (2.0, RankEnded(0, "code 14", 2.0)), *over(2.1, 14)],
        ends(2.0, over_at=2.1),
        72,
        error=HostLost,
        words=("b is lost: its ranks ended without a report",),
    ),
    "a rank fails of one that was killed and whose shim MPI had ended": History(
        [
            *begun(),
            (2.0, RankEnded(2, "late signal 9", 1.9)),
            (2.0, LOST_A_PEER),
            (2.0, RankEnded(0, "code 14", 2.0)),
            *over(2.1, 14),
        ],
        ends(2.0, over_at=2.1),
        137,
        culprit=2,
        words=("rank 2 on b was ended by SIGKILL",),
    ),
    "a rank fails of one that left with 0": History(
        [
            *begun(),
            *well(1.9, 2),
            (2.0, LOST_A_PEER),
            (2.0, RankEnded(0, "code 14", 2.0)),
            *over(2.1, 14),
        ],
        ends(2.0, over_at=2.1),
        73,
        error=MpirunFailed,
        words=("rank 2 on b ended with exit code 0 after 1.9 s, in mid-job",),
    ),
    "a host is silent while the job is ended for another reason": History(
        [
            *begun(),
            (2.0, RankEnded(1, "code 4", 2.0)),
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
            (0.2, RankEnded(0, "code 4", 0.2)),
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
        error=StartTimeout,
        words=("not started within 60 s", "b: 2 ranks not started: ssh has not connected (wait"),
    ),
}

MPIRUN = {
    "mpirun fails before any rank is there": History(
        [
            (0.1, MpirunSaid(b"no such option\n")),
            (0.2, MpirunEnded(213)),
            (0.2, MpirunOutputEnded()),
        ],
        [(0.2, EndHosts(3.0)), (0.2, Finish())],
        73,
        error=MpirunFailed,
        words=(
            "[mpirun] no such option",
            "could not start the job (exit code 213): see its output",
        ),
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
        error=MpirunFailed,
        words=(
            "[mpirun] no such option",
            "could not start the job (exit code 213): see its output",
        ),
    ),
    "mpirun prints an empty line and fails": History(
        [(0.1, MpirunSaid(b"\n")), (0.2, MpirunEnded(1)), (0.2, MpirunOutputEnded())],
        [(0.2, EndHosts(3.0)), (0.2, Finish())],
        73,
        error=MpirunFailed,
        words=("could not start the job (exit code 1): it printed nothing",),
    ),
    "mpirun fails and prints nothing": History(
        [(0.2, MpirunEnded(-11)), (0.2, MpirunOutputEnded())],
        [(0.2, EndHosts(3.0)), (0.2, Finish())],
        73,
        error=MpirunFailed,
        words=("could not start the job (signal 11): it printed nothing",),
    ),
    "mpirun is told to do something else": History(
        [(0.1, MpirunSaid(b"mpirun 5\n")), (0.9, MpirunEnded(0)), (0.9, MpirunOutputEnded())],
        [(0.9, EndHosts(3.0)), (0.9, Finish())],
        0,
        says=[(0.6, "[mpirun] mpirun 5")],
    ),
    "mpirun's words come at once with --verbose": History(
        [(0.1, MpirunSaid(b"mpirun 5\n")), (0.9, MpirunEnded(0)), (0.9, MpirunOutputEnded())],
        [(0.9, EndHosts(3.0)), (0.9, Finish())],
        0,
        says=[(0.1, "[mpirun] mpirun 5")],
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
        error=MpirunFailed,
        words=("mpirun ended the job (exit code 1) while rank 0 on a was running",),
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
        error=MpirunFailed,
        words=("mpirun ended the job (exit code 0) while rank 0 on a was running",),
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
        says=[(2.1, "[mpirun] BAD TERMINATION")],
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
        error=MpirunFailed,
        words=("rank 0 on a ended with exit code 0 after 1.0 s, in mid-job",),
    ),
}
