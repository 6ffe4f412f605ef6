"""The interface of a batch scheduler: a row, with a Starter if it can start ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hvdrun.plan.flavour import Flavour
from hvdrun.plan.hosts import Host
from hvdrun.plan.starter import Allocation, Environ, Starter
from hvdrun.ssh_errors import Trouble


class Requeue(NamedTuple):
    """How to ask a scheduler to run the job in which hvdrun runs again."""

    ask: tuple[str, ...]  # a command
    look: tuple[str, ...]  # one that prints the job's state,
    ending: str  # and a pattern in that if the scheduler is ending the job already
    ended: str  # why it may do so, and how to be told before


class Scheduler(NamedTuple):
    name: str
    more: str  # how to ask for more slots
    # The hosts of the allocation that hvdrun runs in, or None. The second argument returns the text
    # of a file, or raises OSError. Raises HostListError, or UsageError if hvdrun must not run here.
    hosts: Callable[[Environ, Callable[[str], str]], tuple[Host, ...] | None]

    # The rest is for a scheduler with a Starter.
    option: str = ""  # the value of --mpi
    program: str = ""  # the Starter's
    # The Starter in PATH, if hvdrun runs inside a job of this scheduler.
    find_starter: Callable[[Environ], Starter | None] = lambda environ: None
    # The MPI, with the Starter that is to start its ranks. Raises UsageError or NoMpi if it can't.
    start_with: Callable[[Flavour, Starter | None, Allocation | None, Environ], Flavour] | None = (
        None
    )
    # Patterns of what the program prints to stderr if it can't reach a host, and their meaning.
    troubles: tuple[tuple[str, Trouble], ...] = ()

    # How to ask for the job in which hvdrun runs to run again; None outside of one. Raises
    # UsageError if the scheduler can't be asked.
    requeue: Callable[[Environ], Requeue | None] = lambda environ: None
