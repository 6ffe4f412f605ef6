"""Slurm: the hosts of its jobs, and srun, which starts ranks instead of mpirun (`--mpi slurm`) and
commands instead of ssh inside an allocation.

If the user asked Slurm for a number of tasks, its numbers count as if hvdrun had been given them.
Otherwise they are the processors of each host, and become its slots if it has no GPUs.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdrun.errors import HostListError, NoMpi, UsageError
from hvdrun.machine.programs import output_of
from hvdrun.plan.flavour import INTEL, MPICH, NAMES, OPENMPI, Flavour
from hvdrun.plan.hosts import Host, Share, few, parse_host
from hvdrun.plan.request import Allocation, Environ, Starter
from hvdrun.plan.schedulers.scheduler import Requeue, Scheduler
from hvdrun.ssh_errors import Trouble

NAME = "Slurm"

# The protocol that each MPI's ranks speak with the program that starts them.
PMI = {OPENMPI: "pmix", MPICH: "pmi2", INTEL: "pmi2"}

ANSWER_S = 20.0

# A step of its own beside whatever runs in the job. Unbuffered, because frames are not lines. srun
# sends variables unencrypted: only those without which programs do not start.
CONNECTION = (
    *("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none", "--quiet"),
    *("--unbuffered", "--kill-on-bad-exit=0"),
    "--export=PATH,LD_LIBRARY_PATH,HOME,USER,LOGNAME,SHELL,LANG,TMPDIR",
)

_MOST_NODES = 1 << 17  # a list of more nodes is a mistake


# -------------------------------------------------------------------- srun


@dataclass(frozen=True)
class Srun(Starter):
    scheduler = NAME
    # It describes the job; srun would warn that it does not fit the step.
    unwanted = ("SLURM_NTASKS_PER_NODE",)

    pmi: str = ""  # srun's --mpi, if it starts ranks

    def __str__(self) -> str:
        return f"{self.program} --mpi={self.pmi}"

    def connection(self, host: str) -> list[str]:
        return [self.program, *CONNECTION, f"--nodelist={host}"]

    def rank_options(
        self,
        kind: str,
        allocation: Allocation,
        shares: Sequence[Share],
        environ: Mapping[str, str],
        cwd: str,
        binding_args: Sequence[str] = (),
    ) -> list[str]:
        count = sum(share.count for share in shares)
        options = [f"--mpi={self.pmi}", f"--ntasks={count}", f"--nodes={len(shares)}"]
        options += _layout(self.pmi, kind, allocation, shares)
        options += binding_args or ["--cpu-bind=none"]
        # Whether there may be more ranks than processors is the user's decision.
        options += ["--overcommit", "--overlap"]
        if environ.get("SLURM_CPUS_PER_TASK"):
            options += [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"]
        # hvdrun, not srun, decides when the end of a rank ends the job.
        options += ["--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--input=none", "--quiet"]
        return [*options, f"--chdir={cwd}"]


def find_srun(environ: Mapping[str, str]) -> Srun | None:
    """The srun in PATH, if hvdrun runs inside a Slurm job."""
    in_job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    path = shutil.which("srun", path=environ.get("PATH")) if in_job else None
    return Srun(path) if path else None


def with_srun(
    flavour: Flavour,
    starter: Starter | None,
    allocation: Allocation | None,
    environ: Mapping[str, str],
) -> Flavour:
    """The MPI with srun to start it, for `--mpi slurm`.

    Raises:
        UsageError: hvdrun does not run in a Slurm allocation.
        NoMpi: there is no srun, or it does not support this MPI's protocol.
    """
    if allocation is None or allocation.scheduler != NAME:
        raise UsageError(
            "--mpi slurm works only inside a Slurm allocation, and hvdrun runs outside of one:"
            " start it in the script of sbatch or the shell of salloc"
        )
    if starter is None:
        raise NoMpi("--mpi slurm: srun is not in PATH; leave --mpi slurm out to use mpirun")
    srun = starter.program
    try:
        listed = output_of([srun, "--mpi=list"], ANSWER_S, environ)
    except OSError as error:
        raise NoMpi(f"--mpi slurm: `{srun} --mpi=list` failed: {error}") from error
    return replace(flavour, starter=Srun(srun, choose_pmi(flavour.kind, listed)))


def choose_pmi(kind: str, listed: str) -> str:
    """The protocol for this MPI among those that `srun --mpi=list` prints."""
    types: list[str] = [
        word
        for word in re.findall(r"[a-z0-9_]+", listed.partition("...")[2] or listed)
        if re.fullmatch(r"(pmix|pmi|none|openmpi|cray|mpich|lam)\w*", word)
    ]
    wanted = PMI[kind]
    if wanted in types:
        return wanted
    versions = [word for word in types if word.startswith(f"{wanted}_")]
    if versions:
        return max(versions)
    raise NoMpi(
        f"--mpi slurm: {NAMES[kind]} needs `srun --mpi={wanted}`, but `srun --mpi=list` shows"
        f" {', '.join(types) or 'nothing'}; leave --mpi slurm out to use mpirun"
    )


def _layout(
    pmi: str, kind: str, allocation: Allocation, shares: Sequence[Share]
) -> tuple[str, ...]:
    """The options that place each host's ranks, one host after the other.

    Slurm's list of one node for each rank ('arbitrary') is the last resort: its PMI-2 then reports
    that every rank is alone on its host, and its PMIx needs Slurm's own order of the nodes.
    """
    names, counts = [s.host.name for s in shares], [s.count for s in shares]
    known = [host.name for host in allocation.hosts]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--mpi slurm: {name} is not in this allocation, which has {few(known)}"
            )
    in_order = sorted(shares, key=lambda share: known.index(share.host.name))
    if in_order != list(shares):
        right = ",".join(f"{share.host.name}:{share.count}" for share in in_order)
        raise UsageError(
            "--mpi slurm: srun always uses Slurm's order of the hosts; write -H"
            f" {right}, or leave --mpi slurm out to use mpirun"
        )
    first = counts[0]
    if set(counts[:-1]) <= {first} and counts[-1] <= first:
        return f"--distribution=plane={first}", f"--nodelist={','.join(names)}"
    if [(host.name, host.slots) for host in allocation.hosts] == list(
        zip(names, counts, strict=True)
    ):
        return ("--distribution=block",)
    if pmi.startswith(PMI[OPENMPI]):
        each = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        return "--distribution=arbitrary", f"--nodelist={','.join(each)}"
    raise UsageError(
        f"--mpi slurm: srun can't tell the ranks of {NAMES[kind]} which host they are on with"
        f" {', '.join(f'{n}:{c}' for n, c in zip(names, counts, strict=True))}; use the same number"
        " on every host, or leave --mpi slurm out to use mpirun"
    )


# -------------------------------------------------------------------- the hosts of a job


def hosts_of_job(environ: Mapping[str, str], read: Callable[[str], str]) -> tuple[Host, ...] | None:
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes or not (environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")):
        return None
    check_alone(environ)
    return slurm_hosts(nodes, environ)


def check_alone(environ: Mapping[str, str]) -> None:
    """`srun hvdrun …` starts one hvdrun per task. The first one continues: it may run in the shell
    of `srun --pty`."""
    if environ.get("SLURM_PROCID", "0") != "0":
        raise UsageError(
            f"srun has started hvdrun {environ.get('SLURM_STEP_NUM_TASKS', 'several')} times;"
            " start it once, in the script of sbatch or the shell of salloc, without srun"
        )


def slurm_hosts(nodes: str, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """If the job did not ask for tasks, SLURM_TASKS_PER_NODE has the processors of each node."""
    where = "SLURM_JOB_NODELIST"
    names = expand_nodes(nodes, where)
    variable = "SLURM_TASKS_PER_NODE"
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    if environ.get("SLURM_STEP_NUM_TASKS") == "1" and environ.get(variable) == environ.get(
        "SLURM_STEP_TASKS_PER_NODE"
    ):
        # `srun -n1 hvdrun`: the only task of this step is hvdrun itself.
        variable, asked = "SLURM_JOB_CPUS_PER_NODE", False
    per_node = environ.get(variable, "")
    counts = expand_counts(per_node, variable) if per_node else [None] * len(names)
    if len(counts) != len(names):
        raise HostListError(
            f"{where}={nodes} names {len(names)} nodes, but {variable}={per_node} has"
            f" {len(counts)} numbers; expected one number per node"
        )
    return tuple(
        Host(parse_host(name, where).name, count if asked else None, cpus=count)
        for name, count in zip(names, counts, strict=True)
    )


def expand_nodes(text: str, where: str) -> list[str]:
    """'n[01-03,7],m5' → n01 n02 n03 n7 m5."""
    if not re.fullmatch(r"([^\[\],\s]|\[[^\[\]\s]+\])+(,([^\[\],\s]|\[[^\[\]\s]+\])+)*", text):
        raise HostListError(f"{where}={text}: expected names such as n1,n[01-03,7]")
    # Commas in brackets separate the numbers of one name.
    names: list[str] = []
    for entry in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        names += _expand(entry, where, _MOST_NODES - len(names))
    return names


def _expand(entry: str, where: str, most: int) -> list[str]:
    names = [""]
    for plain, inside in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", entry):
        numbers = (
            [number for part in inside.split(",") for number in _range(part, where)]
            if inside
            else [""]
        )
        if len(names) * len(numbers) > most:
            raise HostListError(f"{where}: {entry[:80]!r} is more than {_MOST_NODES} nodes")
        names = [name + plain + number for name in names for number in numbers]
    return names


def _range(part: str, where: str) -> list[str]:
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if match is None or not 0 <= last - first < _MOST_NODES:
        raise HostListError(f"{where}: '[{part}]' is not a range of nodes; expected e.g. [01-03]")
    return [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]


def expand_counts(text: str, where: str) -> list[int]:
    """'4(x2),3' → 4 4 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise HostListError(f"{where}={text}: {part!r} is not a count; expected e.g. 4(x2),3")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_NODES:
            raise HostListError(f"{where}={text[:80]}: has more than {_MOST_NODES} numbers")
        counts += [int(match[1])] * times
    return counts


# -------------------------------------------------------------------- run again


def requeue_of_job(environ: Environ) -> Requeue | None:
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    # The array's number is that of one of its tasks, too. By itself it means the whole array.
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    if task and job == environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{job}_{task}"
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        raise UsageError(
            "--requeue: scontrol, which asks Slurm, is not in PATH; add its folder, or leave"
            " --requeue out"
        )
    return Requeue(
        ask=(scontrol, "requeue", job),
        look=(scontrol, "show", "job", job),
        # Slurm would also run a job again that somebody has cancelled.
        ending=r"JobState=(?!RUNNING)",
        ended="Slurm is ending it already (scancel, or the end of its time); to be told in time,"
        " submit it with `sbatch --signal=B:USR1@120`",
    )


SLURM = Scheduler(
    NAME,
    "--ntasks",
    hosts_of_job,
    option="slurm",
    program="srun",
    find_starter=find_srun,
    start_with=with_srun,
    requeue=requeue_of_job,
    # Not for tasks that ended with an error.
    troubles=(
        (
            r"^srun: error: (?!.*: task )",
            Trouble(
                "srun could not start anything there",
                "`srun --overlap -N1 -w {host} true` must work in this job; -p 22 makes hvdrun use"
                " ssh",
                way="srun",
            ),
        ),
    ),
)
