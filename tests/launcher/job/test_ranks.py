"""What is known of the ranks: their last operations, and whether a preempted job ends in order."""

import json
import struct
import zlib

import pytest

from hvdrun.job.events import (
    HostEnded,
    HostSilent,
    Interrupted,
    RankEnded,
    RankRecorded,
    RankSaid,
    ToPassOn,
)
from hvdrun.machine.notes import LARGEST_BYTES, PREEMPTED
from hvdrun.plan.schedulers.scheduler import Requeue
from hvdrun.running.result import after_requeue, requeue
from tests.launcher.job.histories import TERM, USR1, all_well, asked, begun, ended, over, play, well

LAST = "hvdrun: the last operation that ranks 0-3 have all ended is allreduce 'a'"


def recorded(at, rank, names, ended, lines=b""):
    """The rank has called these operations, and this many of them have ended; lines: from which it
    has waited last."""
    head = json.dumps({"format": 3, "kinds": ["allreduce"], "to_wall_ns": 0}).encode()
    entries = b""
    for place, name in enumerate(names):
        times = (1, 2, 3, 4) if place < ended else (1, 0, 0, 0)
        words = (place + 1, ord(name), *times, 12, 9, 1, 0, 4, -1, 0, 0, 0, name.encode())
        entries += struct.pack("=QQQQQQQIIIIiBBBx112s", *words)
    return [(at, RankRecorded(rank, zlib.compress(b"\0".join((head, lines, entries)))))]


def operations():
    """Rank 1 did not come to what the others wait in."""
    return [
        each
        for rank in range(4)
        for each in recorded(1.0, rank, "a" if rank == 1 else "ab", ended=1)
    ]


FAILS = [ended(1.1, 1, "signal 9"), *asked(1.2, 0, 2, 3), *over(1.3, 137)]


def test_the_report_on_a_rank_that_failed_ends_with_them():
    _, _, verdict = play([*begun(), *operations(), *FAILS])
    assert verdict.report.operations == (
        LAST,
        "    ranks 0,2-3 went on to allreduce 'b', which rank 1 has not called",
        "    rank 1 called no operation after that",
    )
    assert verdict.lines(repeat=False)[-3:] == list(verdict.report.operations)


def test_of_a_rank_that_was_killed_it_is_said_where_it_last_waited():
    lines = b'  File "/job/train.py", line 12 in main\n  File "/job/train.py", line 20 in <module>'
    _, _, verdict = play([*begun(), *recorded(1.0, 1, "a", ended=1, lines=lines), *FAILS])
    assert verdict.report.waited_at == "/job/train.py:12 in main"


def test_a_rank_that_left_is_told_from_one_that_was_ended():
    history = [*begun(), *operations(), *well(1.05, 1)]
    history += [ended(1.1, 0, "code 1"), *asked(1.2, 2, 3), *over(1.3, 1)]
    _, _, verdict = play(history)
    last = "    rank 1 called no operation after that and ended with exit code 0"
    assert last in verdict.lines()


def test_a_rank_that_left_is_to_blame_for_one_that_missed_it_and_ended_without_a_word():
    def verdict(left_at, tails=None):
        history = [*begun(), *operations(), *well(left_at, 1)]
        history += [ended(1.1, 0, "code 14"), *asked(1.2, 2, 3), *over(1.3, 1)]
        return play(sorted(history, key=lambda event: event[0]), tails=tails)[-1]

    assert "rank 1 on a ended with exit code 0" in str(verdict(1.05).error)
    first = verdict(1.05).lines()[0]
    assert first.startswith("hvdrun: rank 1 had left when rank 0 on a ended with exit code 14")
    assert verdict(1.05, {0: b"ValueError: no such file\n"}).culprit == 0
    assert verdict(1.15).culprit == 0  # it left because of rank 0
    died = {0: b"  raise x\nhvdlite.errors.HorovodInternalError: rank %d on a has died\n"}
    found = verdict(1.05, {0: died[0] % 1})
    assert "rank 1 on a ended with exit code 0" in str(found.error)
    assert found.lines()[0].startswith("hvdrun: rank 1 had left when rank 0 on a ended with exit")
    assert verdict(1.05, {0: died[0] % 2}).culprit == 0  # rank 2 runs


@pytest.mark.parametrize(
    "history",
    [
        [*well(1.1, 0, 1, 2, 3), *over(1.3)],
        [(1.05, Interrupted(TERM, 0)), *asked(1.2, 0, 1, 2, 3), *over(1.3, 1)],
        [
            *((1.05, RankSaid(rank, PREEMPTED)) for rank in range(4)),
            *well(1.1, 0, 1, 2, 3),
            *over(1.3),
        ],
    ],
    ids=["ended well", "interrupted", "preempted"],
)
def test_a_job_that_has_not_failed_has_no_such_report(history):
    course, _, verdict = play([*begun(), *operations(), *history])
    assert not any("last operation" in line for line in verdict.lines())
    assert course.recorded.summary()[0] == LAST.removeprefix("hvdrun: ")


def test_what_is_too_long_or_of_no_rank_is_dropped():
    noise = [(1.0, RankRecorded(0, b"x" * (LARGEST_BYTES + 1)))]
    noise += [(1.0, RankRecorded(rank, b"x")) for rank in (-1, 4, 1)]
    course, _, verdict = play([*begun(), *noise, *FAILS])
    assert verdict.exit_code == 137
    assert set(course.recorded.packed) == {1}
    assert course.recorded.boxes() == course.recorded.rows() == {}


ASK = ("/bin/scontrol", "requeue", "7")
SCONTROL = Requeue(ASK, ("true",), "ENDING", "it ends")
LEFT = (
    "hvdrun: the job was preempted: hvd.preempted() has told the ranks, and all have ended in"
    " order; exit code 143, as the work may not be done"
)
FAILED = "hvdrun: the job is not requeued, as it has failed"
SAVING = (
    "hvdrun: the job is not requeued: rank 1 on a {} after hvd.preempted() had told it to leave,"
    " and might do so again"
)


def told(at, *ranks):
    return [(at, RankSaid(rank, PREEMPTED)) for rank in ranks]


def they_ended(at, how, *ranks):
    return [(at, RankEnded(rank, how, at)) for rank in ranks]


def verdict(*events, requeue=SCONTROL):
    """Exit code, the lines that the preemption has added, and whether the job runs again."""
    _, _, found = play(sorted([*begun(), *events], key=lambda e: e[0]), requeue=requeue)
    lines = tuple(line for line in found.lines() if "preempted" in line or "requeue" in line)
    return found.exit_code, lines, found.requeues


USUAL = [(2.0, Interrupted(TERM)), *told(2.1, 0, 1, 2, 3)]


@pytest.mark.parametrize("how", ["asked code 0", "code 0", "late code 0"])
def test_ranks_that_save_and_leave_after_term_make_the_job_run_again(how):
    found = verdict(*USUAL, *they_ended(4.0, how, 0, 1, 2, 3), *over(4.1))
    assert found == (143, (LEFT,), True)


def test_the_outcome_of_a_job_that_saved_and_left_is_its_own_word():
    events = [*begun(), *USUAL, *well(4.0, 0, 1, 2, 3), *over(4.1)]
    assert play(events)[-1].outcome == "preempted"
    events = [*begun(), *USUAL, *asked(22.0, 0, 1, 2, 3), *over(22.1)]
    assert play(events)[-1].outcome == "interrupted"


def test_the_same_after_usr1_or_a_signal_to_a_rank_alone():
    found = verdict((2.0, ToPassOn(USR1)), *told(2.1, 0, 1, 2, 3), *well(9.0, 0, 1, 2, 3), *over(9))
    assert found == (143, (LEFT,), True)


def test_ranks_that_had_joined_need_not_have_been_told():
    found = verdict((2.0, Interrupted(TERM)), *told(2.1, 0), *all_well(4.0))
    assert found == (143, (LEFT,), True)


def test_without_the_option_nobody_is_asked():
    found = verdict(*USUAL, *all_well(4.0), requeue=None)
    assert found == (143, (LEFT,), False)


def test_a_job_that_simply_finished_does_not_run_again():
    assert verdict(*all_well(4.0)) == (0, (), False)


def test_a_job_that_ends_by_term_without_asking_does_not_run_again():
    found = verdict((2.0, Interrupted(TERM)), *asked(2.1, 0, 1, 2, 3), *over(2.2))
    assert found == (143, (), False)


@pytest.mark.parametrize("how", ["asked signal 9", "signal 15"])
def test_ranks_that_hvdrun_or_the_scheduler_killed_have_their_older_checkpoints(how):
    found = verdict(*USUAL, *well(4.0, 0), *they_ended(22.0, how, 1, 2, 3), *over(22.1))
    assert found == (143, (), True)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("asked code 1", "ended with exit code 1"),
        ("code 3", "ended with exit code 3"),
        ("signal 11", "was ended by SIGSEGV (Segmentation fault)"),
        ("oom 9", "was ended by SIGKILL (Killed), sent by the kernel's out-of-memory killer"),
        (
            "shm 7 63/64",
            "was ended by SIGBUS (Bus error) beside a full /dev/shm (0 MiB of 0 MiB used)",
        ),
    ],
)
def test_a_rank_that_fails_while_it_saves_would_do_so_again(how, words):
    found = verdict(*USUAL, *well(4.0, 0, 2, 3), *they_ended(4.0, how, 1), *over(4.1))
    assert found == (143, (SAVING.format(words),), False)


def test_a_failure_before_hvdrun_ended_the_job_is_its_exit_code():
    events = [
        *told(2.1, 0, 1, 2, 3),
        *they_ended(3.0, "code 3", 1),
        *asked(3.2, 0, 2, 3),
        *over(3.3),
    ]
    assert verdict(*events) == (3, (FAILED,), False)


def test_a_job_that_has_lost_a_host_does_not_run_again():
    events = [*told(2.0, 0, 1, 2, 3), (3.0, HostSilent("b", 30.0, 30.0)), *asked(3.1, 0, 1)]
    rest = [(at, event) for at, event in over(3.2) if not isinstance(event, HostEnded)]
    assert verdict(*events, *rest) == (72, (FAILED,), False)


def test_what_the_scheduler_answers_is_said_with_what_to_do():
    assert after_requeue(ASK, None) == ("hvdrun: the job will run again: `/bin/scontrol requeue 7`")
    said = after_requeue(ASK, "slurm_requeue error: Requested operation is disabled")
    assert said == (
        "hvdrun: `/bin/scontrol requeue 7` failed: slurm_requeue error: Requested operation is"
        " disabled; submit the job again with sbatch (`sbatch --requeue` permits requeueing where"
        " Slurm by itself does not)"
    )


def sh(text):
    return "sh", "-c", text


@pytest.mark.parametrize(
    ("look", "ask", "line"),
    [
        (sh("echo state=RUNNING"), sh("true"), "the job will run again: `"),
        (sh("echo state=ENDING"), ("/not/asked",), "the job is not requeued: it ends"),
        (sh("echo ENDING; exit 1"), sh("true"), "the job will run again: `"),
        (("/no/scontrol",), sh("echo why >&2; echo now; exit 1"), "` failed: why; now; submit"),
        (sh("true"), ("/no/scontrol",), "` failed: No such file or directory; submit the job"),
        (sh("true"), sh("exit 2"), "` failed: it printed nothing; submit the job again"),
    ],
)
def test_the_scheduler_is_asked_unless_it_is_ending_the_job(look, ask, line):
    assert line in requeue(Requeue(ask, look, "ENDING", "it ends"))
