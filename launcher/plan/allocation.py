"""The hosts that a batch scheduler has given to this job: Slurm, LSF, SGE, PBS. Pure.

The numbers of the scheduler count as if the user had given them, where a number of tasks was asked
for. Slurm tells the processors of each host too: they count where there are no GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hvdrun.errors import HostListError, UsageError
from hvdrun.plan.hosts import Host, merge, parse_host, parse_slots

SLURM, LSF, SGE, PBS = "Slurm", "LSF", "SGE", "PBS"
# How to ask for more.
REQUESTS = {SLURM: "--ntasks", LSF: "bsub -n", SGE: "qsub -pe", PBS: "mpiprocs, or ppn"}

_MOST_NODES = 1 << 17  # more is a mistake


@dataclass(frozen=True)
class Allocation:
    scheduler: str
    hosts: tuple[Host, ...]

    @property
    def remedy(self) -> str:
        """What to do where there are too few slots."""
        return f"ask {self.scheduler} for more ({REQUESTS[self.scheduler]})"


def find(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    """The allocation that hvdrun runs in. `read` gives the text of a file, or raises OSError.

    Raises:
        HostListError: the scheduler's list can't be understood.
        UsageError: srun has started several of us.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if nodes and (environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")):
        check_alone(environ)
        return Allocation(SLURM, slurm_hosts(nodes, environ))
    for variable, scheduler, parse in (
        ("LSB_DJOB_HOSTFILE", LSF, line_per_slot),
        ("PE_HOSTFILE", SGE, sge_hosts),
        ("PBS_NODEFILE", PBS, line_per_slot),
    ):
        path = environ.get(variable)
        if path:
            try:
                text = read(path)
            except OSError as error:
                raise HostListError(
                    f"{variable}={path}, the hosts that {scheduler} gave: {error.strerror}; give"
                    " them with -H or --hostfile"
                ) from error
            return Allocation(scheduler, parse(text, path))
    if environ.get("LSB_MCPU_HOSTS"):
        return Allocation(LSF, lsf_pairs(environ["LSB_MCPU_HOSTS"]))
    return None


def check_alone(environ: Mapping[str, str]) -> None:
    """`srun hvdrun …` starts as many of us as there are tasks. The first one goes on, as it may be
    the shell of `srun --pty`."""
    if environ.get("SLURM_PROCID", "0") != "0":
        raise UsageError(
            f"srun has started hvdrun {environ.get('SLURM_STEP_NUM_TASKS', 'several')} times;"
            " start it once, in the script of sbatch or the shell of salloc, without srun"
        )


# -------------------------------------------------------------------- Slurm


def slurm_hosts(nodes: str, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Where no tasks were asked for, SLURM_TASKS_PER_NODE are the processors of each node."""
    where = "SLURM_JOB_NODELIST"
    names = expand_nodes(nodes, where)
    variable = "SLURM_TASKS_PER_NODE"
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    if environ.get("SLURM_STEP_NUM_TASKS") == "1" and environ.get(variable) == environ.get(
        "SLURM_STEP_TASKS_PER_NODE"
    ):
        # `srun -n1 hvdrun`: the tasks are those of this step, which are none but hvdrun.
        variable, asked = "SLURM_JOB_CPUS_PER_NODE", False
    per_node = environ.get(variable, "")
    counts = expand_counts(per_node, variable) if per_node else [None] * len(names)
    if len(counts) != len(names):
        raise HostListError(
            f"{where}={nodes} names {len(names)} nodes, but {variable}={per_node} has"
            f" {len(counts)} numbers; they should be as many"
        )
    return tuple(
        Host(parse_host(name, where).name, count if asked else None, cpus=count)
        for name, count in zip(names, counts, strict=True)
    )


def expand_nodes(text: str, where: str) -> list[str]:
    """'n[01-03,7],m5' → n01 n02 n03 n7 m5."""
    if not re.fullmatch(r"([^\[\],\s]|\[[^\[\]\s]+\])+(,([^\[\],\s]|\[[^\[\]\s]+\])+)*", text):
        raise HostListError(f"{where}={text}: expected names such as n1,n[01-03,7]")
    # Commas in brackets divide the numbers of one name.
    entries = re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text)
    return [name for entry in entries for name in _expand(entry, where)]


def _expand(entry: str, where: str) -> list[str]:
    before, bracket, rest = entry.partition("[")
    if not bracket:
        return [entry]
    inside, _, after = rest.partition("]")
    numbers = [number for part in inside.split(",") for number in _range(part, where)]
    tails = _expand(after, where)
    if len(numbers) * len(tails) > _MOST_NODES:
        raise HostListError(f"{where}: {entry!r} is more than {_MOST_NODES} nodes")
    return [before + number + tail for number in numbers for tail in tails]


def _range(part: str, where: str) -> list[str]:
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if match is None or not 0 <= last - first < _MOST_NODES:
        raise HostListError(f"{where}: '[{part}]' is no range of nodes; expected as in [01-03]")
    return [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]


def expand_counts(text: str, where: str) -> list[int]:
    """'4(x2),3' → 4 4 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise HostListError(f"{where}={text}: {part!r} is no count; expected as in 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# -------------------------------------------------------------------- the others


def line_per_slot(text: str, path: str) -> tuple[Host, ...]:
    """PBS and LSF write a host once for each of its slots."""
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
    """'h1 4 h2 2', as LSF has it in LSB_MCPU_HOSTS."""
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
        raise HostListError(f"{where}: it names no host; give the hosts with -H or --hostfile")
    return merge(hosts)
