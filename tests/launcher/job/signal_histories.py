"""Histories of signals to hvdrun: those that end the job, and those that are passed on."""

from hvdrun.job.actions import Finish, PassOn, SignalMpirun
from hvdrun.job.events import (
    HostConnected,
    HostEnded,
    Interrupted,
    MpirunEnded,
    MpirunOutputEnded,
    RankSignalled,
    ReaderLeft,
    ToPassOn,
    ToStop,
)
from hvdrun.plan.schedulers.scheduler import allocation
from tests.launcher.job.histories import (
    HUP,
    INT,
    QUIT,
    TERM,
    USR1,
    History,
    all_well,
    asked,
    begun,
    begun_history,
    closes,
    ended,
    ends,
    over,
    well,
)

USER = {
    "Ctrl-C": begun_history(
        [(2.0, Interrupted(INT)), *asked(2.1, 0, 1, 2, 3), *over(2.2, 1)],
        ends(2.0, over_at=2.2, first=INT),
        130,
    ),
    "Ctrl-C, after which ranks end with codes of their own": begun_history(
        [
            (2.0, Interrupted(INT)),
            ended(2.1, 0, "asked code 130"),
            ended(2.1, 1, "asked code 1"),
            ended(2.1, 2, "asked signal 2"),
            ended(4.1, 3, "asked code 0", by=2.1),
            *over(4.2, 1),
        ],
        ends(2.0, over_at=4.2, first=INT),
        130,
    ),
    "Ctrl-C, which ranks and mpirun ignore": begun_history(
        [(2.0, Interrupted(INT))],
        [*ends(2.0, first=INT), (8.0, SignalMpirun(TERM)), (9.0, Finish())],
        130,
    ),
    "Ctrl-C with --grace-period": begun_history(
        [(2.0, Interrupted(INT)), *asked(12.0, 0, 1, 2, 3), *over(12.1, 1)],
        ends(2.0, 15.0, over_at=12.1, first=INT),
        130,
        options={"grace_period_s": 15.0},
    ),
    "Ctrl-C before any rank has started": History(
        [(0.1, HostConnected("b")), (0.2, Interrupted(INT)), *over(0.5, 1)],
        ends(0.2, over_at=0.5, first=INT),
        130,
    ),
    "Ctrl-C with --grace-period 0": begun_history(
        [(2.0, Interrupted(INT)), *asked(2.1, 0, 1, 2, 3), *over(2.2, 1)],
        ends(2.0, 0.0, over_at=2.2, first=INT),
        130,
        options={"grace_period_s": 0.0},
    ),
    "Ctrl-C, and again": begun_history(
        [(2.0, Interrupted(INT)), (2.5, Interrupted(INT)), *over(2.7, 1)],
        [*ends(2.0, first=INT), *ends(2.5, grace_s=0, over_at=2.7)],
        130,
    ),
    "TERM, which ranks and mpirun ignore": begun_history(
        [(2.0, Interrupted(TERM))],
        [*ends(2.0, 20.0), (23.0, SignalMpirun(TERM)), (24.0, Finish())],
        143,
    ),
    "TERM, and mpirun gets it too and ends first": begun_history(
        [
            (2.0, Interrupted(TERM)),
            *asked(2.1, 1, 2, 3),
            (3.0, MpirunEnded(1)),
            (3.0, MpirunOutputEnded()),
            ended(12.0, 0, "asked code 0"),
            *over(12.1)[:2],
        ],
        ends(2.0, 20.0, over_at=12.1),
        143,
    ),
    "TERM with --grace-period": begun_history(
        [(2.0, Interrupted(TERM)), *asked(5.0, 0, 1, 2, 3), *over(5.1, 1)],
        ends(2.0, 60.0, over_at=5.1),
        143,
        options={"grace_period_s": 60.0},
    ),
    "the terminal is closed": begun_history(
        [(2.0, Interrupted(HUP)), *asked(2.1, 0, 1, 2, 3), *over(2.2, 1)],
        ends(2.0, 20.0, over_at=2.2),
        129,
    ),
    "QUIT, as from Ctrl-Backslash": begun_history(
        [(2.0, Interrupted(QUIT)), *asked(2.1, 0, 1, 2, 3), *over(2.2, 1)],
        ends(2.0, over_at=2.2),
        131,
    ),
    "TERM from a wrapper, and the same from its group": begun_history(
        [
            (2.0, Interrupted(TERM)),
            (2.01, Interrupted(TERM)),
            *asked(12.0, 0, 1, 2, 3),
            *over(12.1, 1),
        ],
        ends(2.0, 20.0, over_at=12.1),
        143,
    ),
    "TERM to one node after the other": begun_history(
        [
            (2.0, Interrupted(TERM, 1)),
            (8.0, Interrupted(TERM)),
            (14.0, Interrupted(TERM, 2)),
            *asked(15.0, 0, 1, 2, 3),
            *over(15.1, 1),
        ],
        ends(2.0, 20.0, over_at=15.1),
        143,
        options={"allocation": allocation(["a", "b"], [2, 2], "python", "agent.py", "secret")},
    ),
    "Ctrl-C on each node, and TERM from what has sent it": begun_history(
        [
            (2.0, Interrupted(INT)),
            (2.3, Interrupted(INT, 1)),
            (2.6, Interrupted(TERM, 2)),
            *asked(4.0, 0, 1, 2, 3),
            *over(4.1, 1),
        ],
        ends(2.0, over_at=4.1, first=INT),
        130,
    ),
    "TERM to each node, and again to one": begun_history(
        [
            (2.0, Interrupted(TERM)),
            (2.01, Interrupted(TERM)),
            (3.0, Interrupted(TERM, 1)),
            (3.01, Interrupted(TERM, 1)),
            (4.0, Interrupted(TERM, 1)),
            *over(4.2, 1),
        ],
        [*ends(2.0, 20.0), *ends(4.0, 0, over_at=4.2)],
        143,
    ),
    "Ctrl-C, and again, which nothing heeds": begun_history(
        [(2.0, Interrupted(INT)), (2.5, Interrupted(INT))],
        [*ends(2.0, first=INT), *ends(2.5, grace_s=0), (3.5, SignalMpirun(TERM)), (4.5, Finish())],
        130,
    ),
    "Ctrl-C three times, which nothing heeds": begun_history(
        [*((at, Interrupted(INT)) for at in (2.0, 2.5, 3.0))],
        [
            *ends(2.0, first=INT),
            *ends(2.5, grace_s=0),
            *ends(3.0, grace_s=0),
            (3.5, SignalMpirun(TERM)),
            (4.5, Finish()),
        ],
        130,
    ),
    "Ctrl-C, and then TERM": begun_history(
        [(2.0, Interrupted(INT)), (2.5, Interrupted(TERM)), *over(2.7, 1)],
        [*ends(2.0, first=INT), *ends(2.5, grace_s=0, over_at=2.7)],
        130,
    ),
    "a rank fails after Ctrl-C": begun_history(
        [(2.0, Interrupted(INT)), ended(2.1, 1, "code 4"), *over(2.2, 1)],
        ends(2.0, over_at=2.2, first=INT),
        130,
    ),
    "TERM while the job is being ended for a failure: the ranks have what is left": begun_history(
        [ended(2.0, 1, "code 4"), (4.0, Interrupted(TERM)), *asked(4.5, 0, 2, 3), *over(4.6, 1)],
        [*ends(2.0), *ends(4.0, 1.0, over_at=4.6)],
        143,
        culprit=1,
    ),
    "Ctrl-C after a host was lost": begun_history(
        [(2.0, HostEnded("b")), (3.0, Interrupted(INT)), *asked(3.5, 0, 1), *over(3.6, 1)[::2]],
        [*ends(2.0), *ends(3.0, 2.0)],
        130,
        cause="host-lost",
        host="b",
    ),
    "a reader that leaves": begun_history(
        [(2.0, ReaderLeft())],
        [(2.0, Finish())],
        141,
    ),
    "a reader that leaves after a rank has failed": begun_history(
        [ended(2.0, 1, "code 4"), (2.1, ReaderLeft())],
        [*ends(2.0), (2.1, Finish())],
        141,
    ),
    "a reader that leaves at Ctrl-C": begun_history(
        [(2.0, Interrupted(INT)), (2.1, ReaderLeft())],
        [*ends(2.0, first=INT), (2.1, Finish())],
        130,
    ),
}


def signalled(at, request, **answers):
    """The answers by rank: r0="sent"."""
    return [(at, RankSignalled(int(r[1:]), request, how)) for r, how in answers.items()]


PASSED_ON = {
    "USR1 for which all ranks have a handler": begun_history(
        [
            (2.0, ToPassOn(USR1)),
            *signalled(2.1, 1, r0="sent", r1="sent", r2="sent", r3="sent"),
            *all_well(3.0),
        ],
        [(2.0, PassOn(USR1, 1)), *closes(3.1)],
    ),
    "USR1 for which two ranks have no handler": begun_history(
        [
            (2.0, ToPassOn(USR1)),
            *signalled(2.1, 1, r0="sent", r1="deadly", r2="sent"),
            *signalled(2.2, 1, r3="deadly"),
            *all_well(3.0),
        ],
        [(2.0, PassOn(USR1, 1)), *closes(3.1)],
    ),
    "USR1, and a host does not answer": begun_history(
        [
            (2.0, ToPassOn(USR1)),
            *signalled(2.1, 1, r0="deadly", r1="sent", r2="sent"),
            *all_well(30.0),
        ],
        [(2.0, PassOn(USR1, 1)), *closes(30.1)],
    ),
    "USR1, and a rank ends meanwhile": begun_history(
        [
            *well(1.0, 3),
            (2.0, ToPassOn(USR1)),
            *signalled(2.1, 1, r0="sent", r1="sent"),
            *well(2.2, 2),
            *well(3.0, 0, 1),
            *over(3.1),
        ],
        [(2.0, PassOn(USR1, 1)), *closes(3.1)],
    ),
    "USR1 twice, and the answers come in another order": begun_history(
        [
            (2.0, ToPassOn(USR1)),
            (2.1, ToPassOn(USR1)),
            *signalled(2.2, 2, r0="sent", r1="sent", r2="sent", r3="sent"),
            *signalled(2.3, 1, r0="deadly", r1="deadly", r2="deadly", r3="deadly"),
            *signalled(2.4, 1, r0="sent"),
            *all_well(3.0),
        ],
        [(2.0, PassOn(USR1, 1)), (2.1, PassOn(USR1, 2)), *closes(3.1)],
    ),
    "USR1 before any rank has started": History(
        [(0.1, ToPassOn(USR1)), *begun(), *all_well(3.0)],
        closes(3.1),
    ),
    "Ctrl-Z": begun_history(
        [(2.0, ToStop()), *all_well(3.0)],
        closes(3.1),
    ),
}
