"""How much of /dev/shm MPI needs, and what is done where there is less."""

from dataclasses import replace

import pytest

from hvdrun.errors import HostSetupError
from hvdrun.plan.command import build
from hvdrun.plan.facts import LocalFacts, SharedMemory
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.plan.hosts import parse_hosts
from hvdrun.plan.request import Request
from hvdrun.plan.shared_memory import CELLS, fit, mpich_bytes, openmpi_bytes, settings
from tests.launcher.preflight.answers import facts_of

MIB = 1 << 20
DOCKER = SharedMemory(64 * MIB, 64 * MIB)
CELLS_SET = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS"
WITHOUT_UCX, FEW_CELLS = ("UCX_TLS", "^sm"), (CELLS_SET, "8")


def free(count_bytes):
    return SharedMemory(count_bytes, 64 * MIB)


# Bytes of /dev/shm in use once the ranks are in MPI, as statvfs says: of MPICH 5.0.2 as it comes,
# with UCX_TLS=^sm, and with 8 cells too.
USED = {2: 10_788_864, 4: 21_569_536, 8: 43_134_976, 16: 86_261_760, 32: 172_515_328}
USED_BY_16 = {(CELLS, True): 86_261_760, (CELLS, False): 16_924_672, (8, False): 2_244_608}


@pytest.mark.parametrize(
    ("ranks", "cells", "with_ucx", "used"),
    [
        *((ranks, CELLS, True, used) for ranks, used in USED.items()),
        *((16, *how, used) for how, used in USED_BY_16.items()),
    ],
)
def test_the_formula_gives_what_was_measured_and_never_less(ranks, cells, with_ucx, used):
    assert used <= mpich_bytes(ranks, cells, with_ucx) <= used + 8 * 1024


# After all ranks have sent to all others.
@pytest.mark.parametrize(("ranks", "used"), [(4, 344_064), (16, 5_832_704), (32, 11_845_632)])
def test_open_mpi_has_more_than_was_measured(ranks, used):
    assert used < openmpi_bytes(ranks)


@pytest.mark.parametrize(
    ("there", "ranks", "variables"),
    [
        (DOCKER, 12, ()),
        (DOCKER, 13, (WITHOUT_UCX,)),
        (DOCKER, 16, (WITHOUT_UCX,)),
        (DOCKER, 63, (WITHOUT_UCX,)),
        (DOCKER, 64, (WITHOUT_UCX, FEW_CELLS)),
        (free(3 * MIB), 16, (WITHOUT_UCX, FEW_CELLS)),
        (free(100 * MIB), 16, ()),
    ],
)
def test_mpich_is_told_to_take_less_only_where_it_must(there, ranks, variables):
    found = fit(MPICH, ranks, there, "localhost", {})
    assert (found.variables, found.problem) == (variables, "")
    assert (FEW_CELLS in variables) == bool(found.remedy)


def test_what_mpich_cannot_start_with_is_an_error_with_its_numbers():
    found = fit(MPICH, 16, free(2 * MIB), "localhost", {})
    assert found.problem == (
        "2 MiB of 64 MiB are free in /dev/shm, and MPICH needs 2.1 MiB there for 16 ranks"
    )
    assert "--shm-size=1g or --ipc=host" in found.remedy
    assert "medium: Memory" in found.remedy
    assert fit(MPICH, 1, SharedMemory(0, 0), "a", {}).problem.startswith("there is no /dev/shm,")


@pytest.mark.parametrize(
    ("given", "variables", "fails"),
    [
        ({"UCX_TLS": "tcp,self"}, (), False),
        ({"UCX_TLS": "^posix"}, (), False),
        ({"UCX_TLS": "all"}, (FEW_CELLS,), True),
        ({"UCX_TLS": "^ud"}, (FEW_CELLS,), True),
        ({CELLS_SET: "2"}, (WITHOUT_UCX,), False),
        ({CELLS_SET: "400"}, (), True),
    ],
)
def test_settings_of_the_users_stay(given, variables, fails):
    found = fit(MPICH, 16, DOCKER, "localhost", given)
    assert bool(found.problem) == fails
    assert fails or found.variables == variables


def test_where_the_users_ucx_needs_too_much_the_error_names_the_variable():
    found = fit(MPICH, 2, free(6 * MIB), "localhost", {"UCX_TLS": "sm,self"})
    assert found.problem.endswith("MPICH needs 8.5 MiB there for 2 ranks with UCX_TLS=sm,self")
    assert found.remedy.startswith("unset UCX_TLS; else in Docker")


def test_a_setting_for_open_mpi_stays():
    assert not fit(OPENMPI, 2, free(0), "localhost", {"OMPI_MCA_btl": "self,sm"}).without
    assert fit(OPENMPI, 2, free(0), "localhost", {}).without == ("sm", "vader")


def test_an_mpi_that_was_not_measured_needs_what_a_container_has():
    assert not fit(INTEL, 2, DOCKER, "localhost", {}).remedy
    assert fit(INTEL, 2, free(63 * MIB), "localhost", {}).remedy


def test_the_host_with_the_least_room_decides_and_an_unknown_one_does_not():
    hosts = [("a", 4, DOCKER), ("b", 16, DOCKER), ("c", 64, None)]
    found = settings(MPICH, hosts, {})
    assert found.variables == dict([WITHOUT_UCX])
    assert found.notes == ()
    assert found.explanations[0].startswith("b: 64 MiB of 64 MiB are free in /dev/shm, and MPICH")
    with pytest.raises(HostSetupError, match=r"^d: 0 MiB of 64 MiB are free"):
        settings(MPICH, [*hosts, ("d", 1, free(0))], {})


FACTS = LocalFacts(
    environ={"PATH": "/venv/bin:/bin", "HOME": "/home/ann"},
    cwd="/home/ann",
    python="/venv/bin/python",
    agent="/venv/hvdrun/agent/agent.py",
    hostname="server1",
    local_names=frozenset({"localhost", "server1"}),
    cores=16,
    gpus=0,
    is_root=False,
    has_fabric=False,
    master_port=45678,
    shm=DOCKER,
)


def command(kind, facts=FACTS, hosts=(), **options):
    request = Request(command=("python", "train.py"), hosts=hosts, **options)
    return build(request, Flavour(kind, "5.0.2", "/venv/bin/mpirun"), facts)


def test_the_ranks_get_the_settings():
    made = command(MPICH, num_proc=16)
    assert made.environment["UCX_TLS"] == "^sm"
    assert "UCX_TLS" in made.added
    assert "UCX_TLS" in made.passed
    assert (made.notes, len(made.explanations)) == ((), 1)
    assert "UCX_TLS" not in command(MPICH, num_proc=8).environment
    assert command(MPICH, num_proc=16, exports={"UCX_TLS": "tcp"}).environment["UCX_TLS"] == "tcp"


def test_open_mpi_is_told_once_what_to_leave_out():
    made = command(OPENMPI, replace(FACTS, shm=free(MIB)), num_proc=2)
    at = made.argv.index("btl")
    assert made.argv[at - 1 : at + 2] == ("--mca", "btl", "^ofi,sm,vader")
    assert made.argv[made.argv.index("mtl") + 1] == "^ofi"
    assert "its ranks use TCP within the host" in made.notes[0]
    made = command(OPENMPI, replace(FACTS, shm=free(MIB), has_fabric=True), num_proc=2)
    assert "^sm,vader" in made.argv
    assert "mtl" not in made.argv
    given = command(OPENMPI, replace(FACTS, shm=free(MIB)), num_proc=2, mpi_args=("--mca", "btl"))
    assert "^ofi,sm,vader" not in given.argv


def test_another_host_counts_too_and_preflight_says_it():
    facts = replace(FACTS, others={"b": facts_of(shm=free(3 * MIB))})
    made = command(MPICH, facts, parse_hosts("server1:2,b:16"))
    assert made.environment[CELLS_SET] == "8"
    assert made.notes == ()
