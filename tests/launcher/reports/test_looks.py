"""What hvdrun says about what a rank's processes do."""

import pytest

from hvdrun.reports.looks import Look, Process, activity

QUEUE = "waits for a file, a socket or a pipe"


def process(pid, state="S", cpu_s=2.0, waits=""):
    return Process(pid, 1, state, cpu_s, "python train.py", True, waits)


def said(before, now):
    return activity(before, now, names_mpi=False)


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ((QUEUE, "sleeps", QUEUE), 9),
        ((QUEUE, QUEUE, QUEUE), 8),
        (("waits for data from a pipe", "waits for a child process to end", ""), 9),
        (("waits until a file is opened or found", "sleeps"), 8),
    ],
)
def test_of_several_workers_the_one_that_does_not_wait_for_work_is_named(waits, named):
    workers = [process(pid, waits=words) for pid, words in enumerate(waits, 8)]
    look = Look(1.0, (process(7, waits=QUEUE), *workers))
    assert f"its child process {named} " in said(look, look._replace(at=2.0))


THROTTLED = "is throttled by its cgroup, whose CPU quota was used up"
QUOTA = {"/cpu/job": (10, 2), "/cpu": (0, 0)}


@pytest.mark.parametrize(
    ("state", "cpu_s", "later", "does"),
    [
        (
            *("R", 2.01, {"/cpu/job": (15, 7), "/cpu": (0, 0)}),
            f"{THROTTLED} in 5 of 5 periods (0.0 s of CPU in the last 0.5 s)",
        ),
        (
            *("S", 2.4, {"/cpu/job": (15, 4)}),
            f"{THROTTLED} in 2 of 5 periods (0.4 s of CPU in the last 0.5 s)",
        ),
        ("R", 2.4, {"/cpu/job": (15, 3)}, "computes (0.4 s of CPU in the last 0.5 s)"),
        ("R", 2.4, {"/cpu/other": (15, 15)}, "computes (0.4 s of CPU in the last 0.5 s)"),
        ("S", 2.0, {"/cpu/job": (15, 7)}, "sleeps"),  # others of its cgroup use it up
    ],
)
def test_a_rank_that_would_compute_is_throttled_if_its_quota_was_used_up(state, cpu_s, later, does):
    before = Look(1.0, (process(7),), quotas=QUOTA)
    now = Look(1.5, (process(7, state, cpu_s),), quotas=later)
    assert said(before, now) == f"{does}: python train.py (process 7)"
