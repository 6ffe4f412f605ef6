"""The batch schedulers that hvdrun knows: each has a row here. May import what `plan` may, but from
`plan` itself only `hosts`, `request` and `flavour`."""

from __future__ import annotations

import re
from collections.abc import Callable

from hvdrun import ssh_errors
from hvdrun.errors import UsageError
from hvdrun.plan.request import Allocation, Environ, Starter
from hvdrun.plan.schedulers.scheduler import LSF, PBS, RENDEZVOUS, SGE, Requeue, Scheduler
from hvdrun.plan.schedulers.slurm import SLURM
from hvdrun.ssh_errors import Trouble

# In this order: the first one with an allocation around hvdrun counts.
SCHEDULERS: tuple[Scheduler, ...] = (SLURM, LSF, SGE, PBS, RENDEZVOUS)
# Those that can start ranks, by their name in --mpi.
BY_OPTION = {scheduler.option: scheduler for scheduler in SCHEDULERS if scheduler.option}


def find(environ: Environ, read: Callable[[str], str]) -> Allocation | None:
    """The allocation that hvdrun runs in. `read` gives the text of a file, or raises OSError.

    Raises:
        HostListError: the scheduler's list can't be understood.
        UsageError: the scheduler has started hvdrun several times.
    """
    for scheduler in SCHEDULERS:
        hosts = scheduler.hosts(environ, read)
        if hosts is not None:
            return Allocation(scheduler.name, hosts)
    return None


def find_starter(environ: Environ) -> Starter | None:
    found = (scheduler.find_starter(environ) for scheduler in SCHEDULERS)
    return next((starter for starter in found if starter is not None), None)


def find_requeue(environ: Environ) -> Requeue:
    """Raises UsageError outside of a job that can be requeued."""
    for scheduler in SCHEDULERS:
        if (found := scheduler.requeue(environ)) is not None:
            return found
    raise UsageError(
        "--requeue asks Slurm to run this job again, but SLURM_JOB_ID is not set: hvdrun does not"
        " run inside a job of Slurm; leave --requeue out, or start hvdrun in a script for sbatch"
    )


def remedy(allocation: Allocation) -> str:
    """What to do if the allocation has too few slots."""
    (more,) = (s.more for s in SCHEDULERS if s.name == allocation.scheduler)
    return f"ask {allocation.scheduler} for more ({more})"


def origin(allocation: Allocation, starter: Starter | None) -> str:
    """Where the hosts come from, for a user who has named none."""
    if allocation.reach is not None:
        return ""
    (program,) = (s.program for s in SCHEDULERS if s.name == allocation.scheduler)
    without = f" ({program} is not in PATH, so hvdrun uses ssh)" if program and not starter else ""
    return (
        f"the hosts are those of the {allocation.scheduler} job around hvdrun{without}; -H names"
        " others, as in -H localhost"
    )


def trouble(stderr: str) -> Trouble:
    """Why a host was not reached, from the stderr of ssh or of a scheduler's program instead."""
    for scheduler in SCHEDULERS:
        for pattern, found in scheduler.troubles:
            if re.search(pattern, stderr, re.MULTILINE):
                return found
    return ssh_errors.trouble(stderr)
