"""What hvdrun does in the course of a job, and its verdict. No process is started."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.agent.signals import length_s
from hvdrun.errors import LaunchError
from hvdrun.job.actions import EndAll, Finish, Release, Say, SignalMpirun
from hvdrun.job.course import Course, Supervision
from hvdrun.job.events import (
    HostBack,
    HostConnected,
    HostEnded,
    HostGaveUp,
    HostQuiet,
    HostSilent,
    HostTalks,
    Interrupted,
    KeeperGone,
    KeepersHere,
    MpirunEnded,
    MpirunOutputEnded,
    MpirunSaid,
    Paused,
    RankClosedFiles,
    RankEnded,
    RankInMpi,
    RankLeftMpi,
    RankLooked,
    RankSaid,
    RankSignalled,
    RankStarted,
    ReaderLeft,
    SshSaid,
    TimePassed,
    ToPassOn,
    ToStop,
)
from hvdrun.machine.notes import INIT_BEGUN, INIT_DONE, INIT_FAILED
from hvdrun.plan.request import Request
from tests.launcher.job.closing_histories import CLOSING
from tests.launcher.job.histories import (
    ILL_LUCK,
    INT,
    TERM,
    USR1,
    asked,
    begun,
    command,
    ended,
    over,
    play,
)
from tests.launcher.job.host_histories import HOSTS
from tests.launcher.job.init_histories import INIT
from tests.launcher.job.measured_histories import MEASURED_BY_RANKS
from tests.launcher.job.mpirun_histories import MPIRUN
from tests.launcher.job.rank_histories import LEFT, RANKS
from tests.launcher.job.signal_histories import PASSED_ON, USER
from tests.launcher.job.silence_histories import SILENCE

HISTORIES = {
    **RANKS,
    **MEASURED_BY_RANKS,
    **LEFT,
    **HOSTS,
    **SILENCE,
    **MPIRUN,
    **USER,
    **PASSED_ON,
    **INIT,
    **CLOSING,
}


def without_repeats(actions):
    """mpirun gets the same signal again and again."""
    pairs = zip([(0, None), *actions], actions, strict=False)
    return [b for a, b in pairs if not (isinstance(b[1], SignalMpirun) and a[1] == b[1])]


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_the_course_of_a_job_and_its_verdict(history):
    course, actions, verdict = play(history.events, **history.options)
    done = [(at, action) for at, action in actions if not isinstance(action, Say | Release)]
    done = without_repeats(done)
    assert done[: len(history.actions)] == history.actions
    # A history may go no further: then hvdrun waits for mpirun, helps it and gives up.
    assert {type(action) for _, action in done[len(history.actions) :]} <= {SignalMpirun, Finish}
    by_code = "failed" if history.code else "succeeded"
    outcome = "interrupted" if course.signal else by_code
    assert (verdict.exit_code, verdict.outcome) == (history.code, outcome)
    cause = history.cause or (None if history.culprit is None else "rank-failed")
    assert (verdict.report and verdict.report.cause, verdict.culprit) == (cause, history.culprit)
    assert not history.host or verdict.report.host == history.host
    is_of_hvdrun = verdict.report is not None and verdict.report.failure is None
    assert (verdict.error is not None) == (is_of_hvdrun and not course.signal)
    assert "[mpirun] " not in verdict.lines()


def test_what_hvdrun_says_in_the_course_of_a_job_and_at_its_end(snapshot):
    """With the times, and what is in the record."""
    lines = []
    for name, history in HISTORIES.items():
        _, actions, verdict = play(history.events, **history.options)
        said = [f"{at:g}: {action.text}" for at, action in actions if isinstance(action, Say)]
        report = verdict.report
        what = f", {report.cause}, rank {report.rank}, host {report.host}" if report else ""
        end = [f"{verdict.exit_code}, {verdict.outcome}{what}:", *verdict.lines()]
        error = [f"hvdrun: {verdict.error}"] if verdict.error else []
        lines += [f"=== {name}", *said, *end, *error, ""]
    snapshot("verdicts", re.sub(r" \(at [0-9:]{8}\)", "", "\n".join(lines)))


def test_the_time_in_the_report_is_that_of_the_failure_not_of_its_report():
    history = RANKS["a rank fails, and the others are ended"]
    _, _, verdict = play(history.events)
    assert (verdict.report.failure.after_s, verdict.report.failure.at) == (2.0, 1e9 + 2.0)


def test_what_ranks_have_measured_stands_above_why_the_job_failed():
    history = MEASURED_BY_RANKS["a rank fails after ranks have sent what they have measured"]
    lines = play(history.events, tails={1: b"its words\n"})[-1].lines(repeat=False)
    assert "took" in lines[0]
    # Just shown, they would stand above the table.
    assert lines[-1] == "    its words"


@pytest.mark.parametrize(
    ("events", "again"),
    [
        ([(0.1, ILL_LUCK), (0.2, MpirunEnded(213))], True),
        ([(0.1, MpirunSaid(b"no such option\n")), (0.2, MpirunEnded(213))], False),
        ([(0.1, RankStarted(0)), (0.1, ILL_LUCK), (0.2, MpirunEnded(213))], False),
        ([(0.1, Interrupted(INT)), (0.1, ILL_LUCK), (0.2, MpirunEnded(213))], False),
    ],
)
def test_a_job_may_start_again_where_mpirun_failed_by_ill_luck_before_any_rank(events, again):
    course, *_ = play([*events, (0.2, MpirunOutputEnded())])
    assert course.may_start_again == again


def releases(events):
    return [at for at, action in play(events)[1] if isinstance(action, Release)]


def test_mpi_notices_that_ranks_have_ended_only_once_all_have():
    """Else it would end those that still have time."""
    end = [*begun(), (2.0, Interrupted(TERM)), *asked(2.1, 0, 1, 2)]
    assert releases(end) == []
    assert releases([*end, *asked(15.0, 3)]) == [15.0]
    assert releases([*end, (15.0, KeeperGone(3))]) == [15.0]
    lost = [(4.0, HostSilent("b", 30.0, 30.0))]
    assert releases([*begun(), (2.0, Interrupted(TERM)), *asked(2.1, 0, 1), *lost]) == [4.0]
    failed = [*begun(), ended(2.0, 1, "code 4")]
    assert releases([*failed, *asked(2.2, 0, 2), *asked(4.9, 3)]) == [4.9]


def test_a_rank_that_starts_while_the_job_is_being_ended_is_awaited_too():
    late = [(2.2, RankStarted(1)), *asked(2.3, 1)]
    assert releases([*begun(ranks=[0]), (2.0, Interrupted(INT)), *asked(2.1, 0), *late]) == [
        2.1,
        2.3,
    ]


@pytest.mark.parametrize("number", [INT, TERM])
def test_by_25_s_after_a_signal_everything_has_ended(number):
    """Slurm and Kubernetes kill after 30."""
    actions = play([*begun(), (2.0, Interrupted(number))])[1]
    assert actions[-1][0] <= 24.0
    assert isinstance(actions[-1][1], Finish)


def test_a_job_that_runs_wakes_hvdrun_for_nothing():
    course = Course(command(a=2, b=2), 0.0, Supervision(Request(())))
    for at, event in begun():
        course.on(at, event)
    assert course.wake_at() is None
    assert course.on(1e6, TimePassed()) == []


# ------------------------------------------------------------ what holds for every history

HOWS = ["code 0", "code 1", "code 3", "signal 9", "signal 15", "oom 9", "shm 11 9/9"]
HOWS += [
    "late signal 15",
    "late code 0",
    "asked signal 15",
    "asked signal 9",
    "missing 2",
    "lacks 11",
]
LOOKS = [b"", b"{}", b"[1]", b'{"at": 1, "processes": []}', b'{"at": 1, "processes": [[1]]}']
LOOKS += [b'{"at": 1, "processes": [[7, 1, "S", 0, "\\u001b", false, "\\u001b"]]}', b"[" * 100_000]
ranks = st.integers(0, 3)
times = st.floats(0.0, 100.0).map(lambda at: round(at, 3))
of_ranks = st.one_of(
    ranks.map(RankStarted),
    ranks.map(RankInMpi),
    ranks.map(RankLeftMpi),
    ranks.map(KeeperGone),
    st.builds(RankSaid, ranks, st.sampled_from([INIT_BEGUN, INIT_DONE, INIT_FAILED, b"?"])),
    st.builds(RankLooked, ranks, st.sampled_from(LOOKS)),
    st.builds(RankClosedFiles, ranks, times),
    st.builds(RankEnded, ranks, st.sampled_from(HOWS), times),
)
WORDS = [b"text\n", b"half", ILL_LUCK.text, b"process rank 2 with PID 7 on node b exiting"]
of_others = st.one_of(
    st.integers(0, 2).map(KeepersHere),
    st.just(HostTalks("b")),
    st.just(SshSaid("b", b"ssh: no\n")),
    st.builds(HostEnded, st.just("b"), st.just(""), st.sampled_from([None, 0, 1])),
    st.just(HostQuiet("b", 6.0, 30.0)),
    st.just(HostBack("b", 8.0)),
    st.just(HostSilent("b", 30.0, 30.0)),
    times.map(lambda at: HostGaveUp("b", 30.0, at)),
    st.just(Paused(8.0)),
    st.sampled_from(WORDS).map(MpirunSaid),
    st.just(MpirunOutputEnded()),
    st.sampled_from([0, 1, -9]).map(MpirunEnded),
    st.sampled_from([INT, TERM]).map(Interrupted),
    st.just(ReaderLeft()),
    st.just(ToPassOn(USR1)),
    st.builds(
        RankSignalled, ranks, st.integers(0, 2), st.sampled_from(["sent", "deadly", "absent"])
    ),
    st.just(ToStop()),
)


OF_HOST = (HostTalks, SshSaid, HostEnded, HostQuiet, HostBack, HostSilent, HostGaveUp)
OF_A_RUNNING_RANK = (
    *(RankEnded, KeeperGone, RankInMpi, RankLeftMpi),
    *(RankSaid, RankLooked, RankClosedFiles),
)


def possible(events):
    """In order of their times, and only what can happen: a host is connected before it says
    something, mpirun and its output end once, and a rank has started before it ends."""
    events = [(0.0, HostConnected("b")), *sorted(events, key=lambda each: each[0])]
    seen, found = set(), []
    for at, event in events:
        kind = type(event)
        if kind in OF_HOST and "gone" in seen:
            continue
        if kind in (MpirunEnded, MpirunOutputEnded) and kind in seen:
            continue
        if kind in OF_A_RUNNING_RANK:
            if ("ended", event.rank) in seen and kind is not KeeperGone:
                continue
            if ("started", event.rank) not in seen:
                found.append((at, RankStarted(event.rank)))
                seen.add(("started", event.rank))
        if kind in (RankEnded, KeeperGone):
            seen.add(("ended", event.rank))
        if kind is RankStarted:
            seen.add(("started", event.rank))
        seen |= {kind} | ({"gone"} if kind in (HostEnded, HostSilent) else set())
        if kind is RankEnded:
            event = RankEnded(event.rank, event.how, min(event.at, at))
        found.append((at, event))
    return found


histories = st.lists(st.tuples(times, of_ranks | of_others), max_size=25).map(possible)


@given(histories)
def test_every_history_ends_once_it_is_being_ended(events):
    """The last deadline is 2 s after KILL. `play` checks that hvdrun does not spin."""
    course, actions, verdict = play(events)
    began = [
        (at, length_s(action.first, action.grace_s))
        for at, action in actions
        if isinstance(action, EndAll)
    ]
    assert bool(began) == course.ending.has_begun
    if began:
        last = min(at + kill_s for at, kill_s in began) + 2.0
        assert course.finished
        finished = [at for at, action in actions if isinstance(action, Finish)]
        assert len(finished) == 1
        assert finished[0] <= last + 1e-3
    assert 0 <= verdict.exit_code < 256


@given(histories)
def test_a_job_whose_mpirun_has_ended_ends(events):
    course, *_ = play([*events, (100.0, MpirunEnded(0)), (100.0, MpirunOutputEnded())])
    assert course.finished


@given(histories)
def test_the_exit_code_is_0_only_where_no_rank_has_failed(events):
    course, _, verdict = play(events)
    if verdict.exit_code == 0:
        assert course.ranks.failures == []
        assert course.error is None
        assert not course.ranks.started or course.ranks.have_all_ended_well
    if verdict.report and verdict.report.failure:
        (failure,) = [f for f in course.ranks.failures if f.rank == verdict.culprit]
        code = failure.exit_code if course.signal is None else 128 + course.signal
        assert verdict.exit_code == code != 0
    if isinstance(verdict.error, LaunchError):
        assert verdict.exit_code == verdict.error.code


FAILS = ["code 1", "code 3", "signal 9", "late signal 15", "asked signal 15"]
failing = st.lists(
    st.tuples(st.sampled_from(FAILS), st.integers(0, 9)), min_size=4, max_size=4
).filter(lambda ends: any(not how.startswith(("late", "asked")) for how, _ in ends))


@given(failing, st.randoms(use_true_random=False))
def test_the_culprit_is_the_same_in_whatever_order_the_reports_come(endings, random):
    """By all orders in which two hosts may report, each its own ranks in any order."""
    reports = [RankEnded(rank, how, 1 + at / 10) for rank, (how, at) in enumerate(endings)]
    in_order = play([*begun(), *((3.0, report) for report in reports), *over(3.5)])[-1]
    random.shuffle(reports)
    shuffled = play([*begun(), *((3.0, report) for report in reports), *over(3.5)])[-1]
    assert in_order == shuffled
    first = [r for r in reports if not r.how.startswith(("late", "asked"))]
    assert in_order.culprit == min(first, key=lambda r: (r.at, r.rank)).rank


@given(histories)
def test_hvdrun_says_nothing_of_mpirun_twice(events):
    _, actions, verdict = play(events)
    said = [action.text for _, action in actions if isinstance(action, Say)]
    shown = [line for line in [*said, *verdict.lines()] if line.startswith("[mpirun] text")]
    assert len(shown) <= sum(e == MpirunSaid(b"text\n") for _, e in events)
