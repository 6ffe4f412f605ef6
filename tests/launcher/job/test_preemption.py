"""Jobs that a batch system has told to end: their exit codes, and which of them run again."""

import pytest

from hvdrun.job.events import HostEnded, HostSilent, Interrupted, RankEnded, RankSaid, ToPassOn
from hvdrun.job.preemption import after_requeue
from hvdrun.machine.notes import PREEMPTED
from hvdrun.plan.schedulers.scheduler import Requeue
from hvdrun.running.requeue import requeue
from tests.launcher.job.histories import TERM, USR1, asked, begun, over, play, well

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


def ended(at, how, *ranks):
    return [(at, RankEnded(rank, how, at)) for rank in ranks]


def verdict(*events, requeue=SCONTROL):
    """Exit code, the lines that the preemption has added, and whether the job runs again."""
    _, _, found = play(sorted([*begun(), *events], key=lambda e: e[0]), requeue=requeue)
    lines = tuple(line for line in found.lines() if "preempted" in line or "requeue" in line)
    return found.exit_code, lines, found.requeues


USUAL = [(2.0, Interrupted(TERM)), *told(2.1, 0, 1, 2, 3)]


@pytest.mark.parametrize("how", ["asked code 0", "code 0", "late code 0"])
def test_ranks_that_save_and_leave_after_term_make_the_job_run_again(how):
    found = verdict(*USUAL, *ended(4.0, how, 0, 1, 2, 3), *over(4.1))
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
    found = verdict((2.0, Interrupted(TERM)), *told(2.1, 0), *well(4.0, 0, 1, 2, 3), *over(4.1))
    assert found == (143, (LEFT,), True)


def test_without_the_option_nobody_is_asked():
    found = verdict(*USUAL, *well(4.0, 0, 1, 2, 3), *over(4.1), requeue=None)
    assert found == (143, (LEFT,), False)


def test_a_job_that_simply_finished_does_not_run_again():
    assert verdict(*well(4.0, 0, 1, 2, 3), *over(4.1)) == (0, (), False)


def test_a_job_that_ends_by_term_without_asking_does_not_run_again():
    found = verdict((2.0, Interrupted(TERM)), *asked(2.1, 0, 1, 2, 3), *over(2.2))
    assert found == (143, (), False)


@pytest.mark.parametrize("how", ["asked signal 9", "signal 15"])
def test_ranks_that_hvdrun_or_the_scheduler_killed_have_their_older_checkpoints(how):
    found = verdict(*USUAL, *well(4.0, 0), *ended(22.0, how, 1, 2, 3), *over(22.1))
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
    found = verdict(*USUAL, *well(4.0, 0, 2, 3), *ended(4.0, how, 1), *over(4.1))
    assert found == (143, (SAVING.format(words),), False)


def test_a_failure_before_hvdrun_ended_the_job_is_its_exit_code():
    events = [*told(2.1, 0, 1, 2, 3), *ended(3.0, "code 3", 1), *asked(3.2, 0, 2, 3), *over(3.3)]
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
