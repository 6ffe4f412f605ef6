"""How much of /dev/shm an MPI needs for the ranks of a host, and the settings by which it needs
less. Pure.

Measured with the wheels of MPICH 5.0.2 and Open MPI 5.0.11 (docs/design/starting-and-ending.md has
the table), n ranks on a host:

    MPICH     8 KiB + n (8,768 + cells * 16,384), and n * 4,333,568 of UCX; 64 cells by default
    Open MPI  n * 73,728 at first, up to n * 370,000 once every rank has sent to every other one;
              a rank uses it only if 16 MiB are free when it starts

MPICH ends by SIGBUS or SIGSEGV where that is not free. Within a host hvdlite uses memory of its own
and MPI only for small messages, so none of the settings slows it down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hvdrun.errors import HostSetupError
from hvdrun.plan.facts import SharedMemory
from hvdrun.plan.flavour import MPICH, OPENMPI
from hvdrun.plan.request import Request

CELLS, FEW_CELLS = 64, 8  # of MPICH, per rank: the second still lets some messages be on the way
CELL_BYTES = 16_384
MPICH_RANK_BYTES, MPICH_HOST_BYTES = 8_768, 8_192
UCX_RANK_BYTES = 4_333_568
OPENMPI_SEGMENT_BYTES = 16 << 20
OPENMPI_RANK_BYTES = 512 << 10
UNKNOWN_MPI_BYTES = 64 << 20  # the default of a container; for an MPI that was not measured

# The variables of the user's that count here.
UCX_VARIABLE, CELLS_VARIABLE, BTL_VARIABLE = READ = (
    "UCX_TLS",
    "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS",
    "OMPI_MCA_btl",
)
UCX_ELSEWHERE = "^sm"  # UCX without its ways through shared memory: MPICH has its own
# Open MPI's parts that use /dev/shm, under the names of all its versions.
OPENMPIS_PARTS = ("sm", "vader")
_UCX_SHARES = re.compile(r"(all|sm|shm|mm|posix)(:.*)?")

REMEDY = (
    "in Docker give --shm-size=1g or --ipc=host, in Kubernetes mount an emptyDir with `medium:"
    " Memory` at /dev/shm; or start fewer ranks there"
)


@dataclass(frozen=True)
class Fit:
    """How an MPI gets along with the /dev/shm of a host. `problem`: it can't."""

    variables: tuple[tuple[str, str], ...] = ()  # for the ranks, by which it needs less
    without: tuple[str, ...] = ()  # of Open MPI's parts
    text: str = ""  # what is said about these settings
    problem: str = ""
    # Of a problem, or if a program that itself sends much by MPI is slower with these settings.
    remedy: str = ""


@dataclass(frozen=True)
class Settings:
    """For all ranks of a job: what the host with the least room needs."""

    variables: Mapping[str, str]
    without: tuple[str, ...]  # of Open MPI's parts
    notes: tuple[str, ...]
    explanations: tuple[str, ...]  # for --verbose


def variables_of(request: Request, environ: Mapping[str, str]) -> dict[str, str]:
    """The user's settings that decide how much MPI takes, by the names in READ."""
    found = {name: request.variable(name, environ) for name in READ}
    if "btl" in request.mpi_args:
        found[BTL_VARIABLE] = ""
    return {name: value for name, value in found.items() if value is not None}


def settings(
    kind: str, hosts: Iterable[tuple[str, int, SharedMemory | None]], environ: Mapping[str, str]
) -> Settings:
    """`hosts`: name, number of ranks, and what is known. Raises HostSetupError if one has too
    little."""
    variables: dict[str, str] = {}
    without: tuple[str, ...] = ()
    notes, explanations = [], []
    for host, ranks, there in hosts:
        if there is None:
            continue
        found = fit(kind, ranks, there, host, environ)
        if found.problem:
            raise HostSetupError(f"{host}: {found.problem}; {found.remedy}")
        variables.update(found.variables)
        without = without or found.without
        if found.remedy:
            notes.append(f"{host}: {found.text}; {found.remedy}")
        elif found.text:
            explanations.append(f"{host}: {found.text}")
    return Settings(variables, without, tuple(notes), tuple(explanations))


def fit(kind: str, ranks: int, there: SharedMemory, host: str, environ: Mapping[str, str]) -> Fit:
    """`environ`: the ranks' variables, in which the user may have set those of READ."""
    if kind == MPICH:
        return _mpich(ranks, there, host, environ)
    if kind == OPENMPI:
        return Fit() if BTL_VARIABLE in environ else _openmpi(ranks, there, host)
    if there.free_bytes >= UNKNOWN_MPI_BYTES:
        return Fit()
    return Fit(text=_free(there), remedy=_remedy(there, host))


def mpich_bytes(ranks: int, cells: int, with_ucx: bool) -> int:
    of_rank = MPICH_RANK_BYTES + cells * CELL_BYTES + (UCX_RANK_BYTES if with_ucx else 0)
    return MPICH_HOST_BYTES + ranks * of_rank


def openmpi_bytes(ranks: int) -> int:
    return OPENMPI_SEGMENT_BYTES + ranks * OPENMPI_RANK_BYTES if ranks > 1 else 0


def _mpich(ranks: int, there: SharedMemory, host: str, environ: Mapping[str, str]) -> Fit:
    given = environ.get(UCX_VARIABLE)
    number = environ.get(CELLS_VARIABLE, "")
    cells = int(number) if number.isdecimal() else CELLS
    with_ucx = given is None or _ucx_shares(given)
    wanted = mpich_bytes(ranks, cells, with_ucx)
    if there.free_bytes >= wanted:
        return Fit()
    variables: tuple[tuple[str, str], ...] = ()
    if given is None:
        with_ucx = False
        variables += ((UCX_VARIABLE, UCX_ELSEWHERE),)
    least = mpich_bytes(ranks, cells, with_ucx)
    is_slower = there.free_bytes < least and not number
    if is_slower:
        variables += ((CELLS_VARIABLE, str(FEW_CELLS)),)
        least = mpich_bytes(ranks, FEW_CELLS, with_ucx)
    if there.free_bytes < least:
        theirs = given is not None and with_ucx
        how = f" with {UCX_VARIABLE}={given}" if theirs else ""
        remedy = _remedy(there, host)
        return Fit(
            problem=f"{_free(there)}, and MPICH needs {size(least)} there for {_ranks(ranks)}{how}",
            remedy=f"unset {UCX_VARIABLE}; else {remedy}" if theirs else remedy,
        )
    how = " ".join(f"{name}={value}" for name, value in variables)
    return Fit(
        variables,
        text=(
            f"{_free(there)}, and MPICH would take {size(wanted)} there for {_ranks(ranks)}: with"
            f" {how} it takes {size(least)}"
        ),
        remedy=_remedy(there, host) if is_slower else "",
    )


def _openmpi(ranks: int, there: SharedMemory, host: str) -> Fit:
    wanted = openmpi_bytes(ranks)
    if there.free_bytes >= wanted:
        return Fit()
    return Fit(
        without=OPENMPIS_PARTS,
        text=(
            f"{_free(there)}, and Open MPI may take {size(wanted)} there for {_ranks(ranks)}: its"
            " ranks use TCP within the host"
        ),
        remedy=_remedy(there, host),
    )


def _ucx_shares(given: str) -> bool:
    """Whether UCX puts memory into /dev/shm with this UCX_TLS."""
    names = any(_UCX_SHARES.fullmatch(word) for word in given.lstrip("^").split(","))
    return names != given.startswith("^")


def _free(there: SharedMemory) -> str:
    if not there.size_bytes:
        return "there is no /dev/shm"
    return f"{size(there.free_bytes)} of {size(there.size_bytes)} are free in /dev/shm"


def _remedy(there: SharedMemory, host: str) -> str:
    if not there.leftovers:
        return REMEDY
    return f"{leftovers(there, host)}; else {REMEDY}"


def leftovers(there: SharedMemory, host: str) -> str:
    """Names the files that earlier jobs have left."""
    names = there.leftovers
    shown = " ".join(f"/dev/shm/{name}" for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    files = "1 file" if len(names) == 1 else f"{len(names)} files"
    verb = "takes" if len(names) == 1 else "take"
    return (
        f"on {host} {files} of your earlier jobs, which no process uses, {verb}"
        f" {size(there.leftover_bytes)}: rm {shown}{more}"
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def size(count_bytes: int) -> str:
    if count_bytes >= 1 << 30:
        return f"{count_bytes / (1 << 30):.1f} GiB"
    return f"{round(count_bytes / (1 << 20), 0 if count_bytes >= 10 << 20 else 1):g} MiB"
