"""The interface of a batch scheduler: a row, with a Starter if it can start ranks. And those that
need little: LSF, SGE and PBS, which leave a list of the job's hosts and their slots, whose numbers
count as if the user had given them; and hosts that have each started hvdrun themselves, which is no
scheduler, but they come as its allocation does, with a program that reaches them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdrun.errors import HostListError
from hvdrun.machine.environment import NODES
from hvdrun.plan.flavour import Flavour
from hvdrun.plan.hosts import Host, merge, parse_host, parse_slots
from hvdrun.plan.request import Allocation, Environ, Starter
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


# -------------------------------------------------------------------- lists of hosts

Read = Callable[[str], str]
Parse = Callable[[str, str], tuple[Host, ...]]


def listed(scheduler: str, variable: str, parse: Parse) -> Callable[..., tuple[Host, ...] | None]:
    """For Scheduler.hosts: reads the file that the variable names."""

    def hosts(environ: Environ, read: Read) -> tuple[Host, ...] | None:
        path = environ.get(variable)
        if not path:
            return None
        try:
            text = read(path)
        except OSError as error:
            raise HostListError(
                f"{variable}={path}, the list of hosts from {scheduler}: {error.strerror}; give the"
                " hosts with -H or --hostfile"
            ) from error
        return parse(text, path)

    return hosts


def lsf_hosts(environ: Environ, read: Read) -> tuple[Host, ...] | None:
    found = listed("LSF", "LSB_DJOB_HOSTFILE", line_per_slot)(environ, read)
    pairs = environ.get("LSB_MCPU_HOSTS")
    return lsf_pairs(pairs) if found is None and pairs else found


def line_per_slot(text: str, path: str) -> tuple[Host, ...]:
    """The list of PBS and LSF, which names a host once for each of its slots."""
    return _merged(
        ((line.strip(), "1", f"{path}:{n}") for n, line in enumerate(text.splitlines(), 1)), path
    )


def sge_hosts(text: str, path: str) -> tuple[Host, ...]:
    """Host, slots, queue and processors in each line."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if len(words) == 1:
            raise HostListError(f"{path}:{number}: {line.strip()!r}: expected a host and its slots")
        entries.append((words[0], words[1], f"{path}:{number}") if words else ("", "", ""))
    return _merged(entries, path)


def lsf_pairs(text: str) -> tuple[Host, ...]:
    """'h1 4 h2 2', the form of LSF's LSB_MCPU_HOSTS."""
    words = text.split()
    where = "LSB_MCPU_HOSTS"
    if len(words) % 2:
        raise HostListError(f"{where}={text}: expected pairs of a host and its slots")
    return _merged(((words[i], words[i + 1], where) for i in range(0, len(words), 2)), where)


def _merged(entries: Iterable[tuple[str, str, str]], where: str) -> tuple[Host, ...]:
    hosts = [
        (Host(parse_host(name, place).name, parse_slots(slots, place)), place)
        for name, slots, place in entries
        if name
    ]
    if not hosts:
        raise HostListError(f"{where} names no host; give the hosts with -H or --hostfile")
    return merge(hosts)


LSF = Scheduler("LSF", "bsub -n", lsf_hosts)
SGE = Scheduler("SGE", "qsub -pe", listed("SGE", "PE_HOSTFILE", sge_hosts))
PBS = Scheduler("PBS", "mpiprocs, or ppn", listed("PBS", "PBS_NODEFILE", line_per_slot))


# -------------------------------------------------------------------- each host starts hvdrun

NAME = "the rendezvous"


@dataclass(frozen=True)
class Reach(Starter):
    """The agent's role `reach`, which starts no ranks. secret: by which it finds hvdrun on this
    host."""

    scheduler = NAME
    python: str
    secret: str

    @property
    def variables(self) -> Mapping[str, str]:
        return {NODES: self.secret}

    def connection(self, host: str) -> list[str]:
        return [self.python, "-I", "-S", self.program, "reach", host]


def allocation(
    names: Sequence[str], slots: Sequence[int | None], python: str, agent: str, secret: str
) -> Allocation:
    """The first of the names is this machine's."""
    hosts = tuple(Host(name, count) for name, count in zip(names, slots, strict=True))
    return Allocation(NAME, hosts, names[0], Reach(agent, python, secret))


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
