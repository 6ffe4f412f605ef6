"""Slurm's srun: in mpirun's place (`--mpi slurm`), and in ssh's place inside an allocation."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdrun.errors import NoMpi, UsageError
from hvdrun.machine.programs import output_of
from hvdrun.plan.allocation import SLURM, Allocation
from hvdrun.plan.flavour import INTEL, MPICH, NAMES, OPENMPI, Flavour
from hvdrun.plan.hosts import Host, Share

# What each MPI's ranks speak with the one that starts them.
PMI = {OPENMPI: "pmix", MPICH: "pmi2", INTEL: "pmi2"}

ANSWER_S = 20.0

# Into a step of its own beside whatever runs in the job. Frames are no lines: unbuffered.
CONNECTION = (
    *("--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none", "--quiet"),
    *("--unbuffered", "--export=ALL", "--kill-on-bad-exit=0"),
)


def find_srun(environ: Mapping[str, str]) -> str:
    """The srun in PATH; empty if there is none, or no job of Slurm's around us."""
    in_job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    return (shutil.which("srun", path=environ.get("PATH")) or "") if in_job else ""


def reaches(
    hosts: Sequence[Host], allocation: Allocation | None, srun: str, ssh_is_set_up: bool
) -> bool:
    """Whether srun, and not ssh, connects to these hosts: they are the job's, and the user has
    said nothing about ssh."""
    if not srun or allocation is None or allocation.scheduler != SLURM or ssh_is_set_up:
        return False
    ours = {host.name for host in allocation.hosts}
    return all(h.name in ours and h.user is None and h.port is None for h in hosts)


def with_srun(
    flavour: Flavour, srun: str, allocation: Allocation | None, environ: Mapping[str, str]
) -> Flavour:
    """The MPI with srun to start it, for `--mpi slurm`.

    Raises:
        UsageError: there is no allocation of Slurm's.
        NoMpi: no srun, or none that speaks what this MPI does.
    """
    if allocation is None or allocation.scheduler != SLURM:
        raise UsageError(
            "--mpi slurm works inside an allocation of Slurm's, and there is none here: start"
            " hvdrun in the script of sbatch or the shell of salloc"
        )
    if not srun:
        raise NoMpi("--mpi slurm: there is no srun in PATH; leave it out, and mpirun is used")
    try:
        listed = output_of([srun, "--mpi=list"], ANSWER_S, environ)
    except OSError as error:
        raise NoMpi(f"--mpi slurm: `{srun} --mpi=list` failed: {error}") from error
    return replace(flavour, srun=srun, pmi=choose_pmi(flavour, listed))


def choose_pmi(flavour: Flavour, listed: str) -> str:
    """Of what `srun --mpi=list` prints, the one that this MPI speaks."""
    types: list[str] = [
        word
        for word in re.findall(r"[a-z0-9_]+", listed.partition("...")[2] or listed)
        if re.fullmatch(r"(pmix|pmi|none|openmpi|cray|mpich|lam)\w*", word)
    ]
    wanted = PMI[flavour.kind]
    if wanted in types:
        return wanted
    versions = [word for word in types if word.startswith(f"{wanted}_")]
    if versions:
        return max(versions)
    raise NoMpi(
        f"--mpi slurm: {NAMES[flavour.kind]} needs `srun --mpi={wanted}`, and this Slurm knows only"
        f" {', '.join(types) or 'what it does not tell'}; leave --mpi slurm out, and mpirun is used"
    )


def step(
    flavour: Flavour,
    allocation: Allocation,
    shares: Sequence[Share],
    environ: Mapping[str, str],
    cwd: str,
    binding_args: Sequence[str] = (),
) -> list[str]:
    """srun's options for the ranks.

    Raises UsageError for hosts and numbers that srun can't do.
    """
    count = sum(share.count for share in shares)
    options = [f"--mpi={flavour.pmi}", f"--ntasks={count}", f"--nodes={len(shares)}"]
    options += _layout(flavour, allocation, shares)
    options += binding_args or ["--cpu-bind=none"]
    # More ranks than processors are the user's business.
    options += ["--overcommit", "--overlap"]
    if environ.get("SLURM_CPUS_PER_TASK"):
        options += [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"]
    # hvdrun says when a rank's end is the end of all.
    options += ["--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--input=none", "--quiet"]
    return [*options, f"--chdir={cwd}"]


def _layout(flavour: Flavour, allocation: Allocation, shares: Sequence[Share]) -> tuple[str, ...]:
    """So many ranks on each host, one host after the other.

    Slurm's list of one node for each rank ('arbitrary') is the last resort: its PMI-2 then says
    that every rank is alone on its host, and its PMIx needs Slurm's own order of the nodes.
    """
    names, counts = [s.host.name for s in shares], [s.count for s in shares]
    known = [host.name for host in allocation.hosts]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--mpi slurm: {name} is no host of this allocation, which has {', '.join(known)}"
            )
    in_order = sorted(shares, key=lambda share: known.index(share.host.name))
    if in_order != list(shares):
        right = ",".join(f"{share.host.name}:{share.count}" for share in in_order)
        raise UsageError(
            "--mpi slurm: srun keeps the order in which Slurm has the hosts; write -H"
            f" {right}, or leave --mpi slurm out, and mpirun is used"
        )
    first = counts[0]
    if set(counts[:-1]) <= {first} and counts[-1] <= first:
        return f"--distribution=plane={first}", f"--nodelist={','.join(names)}"
    if [(host.name, host.slots) for host in allocation.hosts] == list(
        zip(names, counts, strict=True)
    ):
        return ("--distribution=block",)
    if flavour.pmi.startswith(PMI[OPENMPI]):
        each = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        return "--distribution=arbitrary", f"--nodelist={','.join(each)}"
    raise UsageError(
        f"--mpi slurm: srun can't tell the ranks of {NAMES[flavour.kind]} who is where with"
        f" {', '.join(f'{n}:{c}' for n, c in zip(names, counts, strict=True))}; give every host as"
        " many, or leave --mpi slurm out, and mpirun is used"
    )
