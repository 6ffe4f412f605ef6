"""What histories of jobs are made of: what happens when, what hvdrun does, and its verdict.

Unless it says otherwise, a job has ranks 0 and 1 on this host, a, and 2 and 3 on b.
"""

import json
from dataclasses import dataclass, field

from hvdrun.job.actions import EndAll, EndHosts, Finish, Look
from hvdrun.job.course import Course, Supervision
from hvdrun.job.events import (
    HostConnected,
    HostEnded,
    HostTalks,
    KeepersHere,
    MpirunEnded,
    MpirunOutputEnded,
    MpirunSaid,
    RankEnded,
    RankInMpi,
    RankLooked,
    RankSaid,
    RankStarted,
    TimePassed,
)
from hvdrun.job.verdict import reach
from hvdrun.machine.notes import INIT_BEGUN
from hvdrun.plan.command import Command
from hvdrun.plan.hosts import Host, Share
from hvdrun.plan.request import Request

HUP, INT, QUIT, KILL, USR1, PIPE, TERM = 1, 2, 3, 9, 10, 13, 15
DAYS_S = 2e5


def command(environment=None, far=None, **hosts):
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
        far=far,
        sent=None,
        **rest,
    )


def play(events, job=None, tails=None, requeue=None, **options):
    """The course after these events, and its actions with their times. It is woken at each
    `wake_at`, also after the last event, for some days: while ranks wait in init, hvdrun reports it
    again and again. `options`: the request's."""
    supervision = Supervision(Request((), **options), requeue=requeue)
    course = Course(job or command(a=2, b=2), 0.0, supervision)
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


def all_well(at):
    """All ranks end with 0, and then everything."""
    return [*well(at, 0, 1, 2, 3), *over(round(at + 0.1, 3))]


def ended(at, rank, how, by=None):
    """hvdrun learns it at this time; by: when it was."""
    return at, RankEnded(rank, how, at if by is None else by)


def in_mpi(at, *ranks):
    return [(at, RankInMpi(rank)) for rank in ranks]


def init(at, *ranks, kind=INIT_BEGUN):
    return [(at, RankSaid(rank, kind)) for rank in ranks]


def seen(at, rank, cpu_s=0.0, state="S", children=(), by=None, frames=(), why=""):
    """A keeper's answer about a rank that runs train.py, by its host's clock. frames: its stack;
    None: it was not asked for."""
    processes = [[100 + rank, 1, state, cpu_s, "python train.py", False, ""], *children]
    look = {"at": at if by is None else by, "processes": processes}
    if frames is not None:
        look |= {"frames": frames, "no_frames": why}
    return [(at, RankLooked(rank, json.dumps(look).encode()))]


def over(at, code=0):
    """Nothing is left on any host, and mpirun ends too."""
    events = [KeepersHere(0), HostEnded("b", "", 0), MpirunEnded(code), MpirunOutputEnded()]
    return [(at, event) for event in events]


def closes(at):
    """mpirun has ended by itself, and so has everything."""
    return [(at, EndHosts(3.0)), (at, Finish())]


def looks(at, *ranks):
    """The ranks are asked what they do, and half a second later where they are in their code."""
    return [(at, Look(ranks)), (round(at + 0.5, 3), Look(ranks, True))]


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
    code: int = 0
    culprit: int | None = None  # the rank in the report
    cause: str = ""  # "": a rank has failed, if there is a culprit
    host: str = ""  # in the report, if a host is the cause
    options: dict = field(default_factory=dict)


def begun_history(events, *args, **options):
    """Of a job whose ranks have started."""
    return History([*begun(), *events], *args, **options)


LOST_A_PEER = MpirunSaid(
    b"[a:00000] *** reported by process [3216572417,0]\n[a:00000] *** on a NULL communicator\n"
)
IMPROPER = MpirunSaid(b"process rank 1 with PID 7 on node a exiting\nimproperly. There are\n")
ILL_LUCK = MpirunSaid(b"The PMIx server's listener thread failed to start. We cannot\n")
