"""Schedulers that leave a list of the job's hosts and their slots: LSF, SGE, PBS. Pure.

Their numbers of slots count as if the user had given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdrun.errors import HostListError
from hvdrun.plan.hosts import Host, merge, parse_host, parse_slots
from hvdrun.plan.schedulers.scheduler import Scheduler
from hvdrun.plan.starter import Environ

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
