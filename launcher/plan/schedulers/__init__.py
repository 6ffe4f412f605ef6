"""The batch schedulers that hvdrun knows: a file and a row here for each. May import what `plan`
may, but of `plan` itself only `hosts` and `flavour`."""

from __future__ import annotations

import re
from collections.abc import Callable

from hvdrun import ssh_errors
from hvdrun.plan.schedulers.host_files import LSF, PBS, SGE
from hvdrun.plan.schedulers.scheduler import Allocation, Environ, Scheduler, Starter
from hvdrun.plan.schedulers.slurm import SLURM
from hvdrun.ssh_errors import Trouble

# The first whose allocation hvdrun runs in counts.
SCHEDULERS: tuple[Scheduler, ...] = (SLURM, LSF, SGE, PBS)
# Those that start ranks, by their word for --mpi.
BY_OPTION = {scheduler.option: scheduler for scheduler in SCHEDULERS if scheduler.option}


def find(environ: Environ, read: Callable[[str], str]) -> Allocation | None:
    """The allocation that hvdrun runs in. `read` gives the text of a file, or raises OSError.

    Raises:
        HostListError: the scheduler's list can't be understood.
        UsageError: the scheduler has started several of us.
    """
    for scheduler in SCHEDULERS:
        hosts = scheduler.hosts(environ, read)
        if hosts is not None:
            return Allocation(scheduler.name, hosts)
    return None


def find_starter(environ: Environ) -> Starter | None:
    found = (scheduler.find_starter(environ) for scheduler in SCHEDULERS)
    return next((starter for starter in found if starter is not None), None)


def remedy(allocation: Allocation) -> str:
    """What to do where the allocation has too few slots."""
    (more,) = (s.more for s in SCHEDULERS if s.name == allocation.scheduler)
    return f"ask {allocation.scheduler} for more ({more})"


def trouble(stderr: str) -> Trouble:
    """Why a host was not reached, by what ssh said, or a scheduler's program in its place."""
    for scheduler in SCHEDULERS:
        for pattern, found in scheduler.troubles:
            if re.search(pattern, stderr, re.MULTILINE):
                return found
    return ssh_errors.trouble(stderr)
