"""Hosts that have each started hvdrun themselves: not a scheduler, but they come as its allocation
does, with a program that reaches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdrun.machine.environment import NODES
from hvdrun.plan.hosts import Host, Share
from hvdrun.plan.schedulers.scheduler import Scheduler
from hvdrun.plan.starter import Allocation, Environ
from hvdrun.ssh_errors import Trouble

NAME = "the rendezvous"


class Reach(NamedTuple):
    """The agent's role `reach`. secret: by which it finds hvdrun on this host."""

    python: str
    agent: str
    secret: str

    @property
    def scheduler(self) -> str:
        return NAME

    @property
    def program(self) -> str:
        return self.agent

    @property
    def unwanted(self) -> tuple[str, ...]:
        return ()

    @property
    def variables(self) -> Mapping[str, str]:
        return {NODES: self.secret}

    def connection(self, host: str) -> list[str]:
        return [self.python, "-I", "-S", self.agent, "reach", host]

    def rank_options(
        self,
        kind: str,
        allocation: Allocation,
        shares: Sequence[Share],
        environ: Environ,
        cwd: str,
        binding_args: Sequence[str],
    ) -> list[str]:
        raise NotImplementedError("mpirun starts the ranks of these hosts")


def allocation(
    names: Sequence[str], slots: Sequence[int | None], python: str, agent: str, secret: str
) -> Allocation:
    """The first of the names is this machine's."""
    hosts = tuple(Host(name, count) for name, count in zip(names, slots, strict=True))
    return Allocation(NAME, hosts, names[0], Reach(python, agent, secret))


ENDED = Trouble(
    "hvdrun there has ended, or can't be reached any more",
    "look at what it has printed on {host}, and start all nodes again",
    "hvdrun",
)

# Their number of processes is hvdrun's own choice, so that there is always room for all.
RENDEZVOUS = Scheduler(
    NAME,
    "--nodes",
    lambda environ, read: None,
    troubles=((r"^hvdrun: (hvdrun on|the connection to hvdrun on|no connection to) ", ENDED),),
)
