"""init, shutdown and the ranks."""

import os
import sys

import pytest
import torch

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.worlds import mpiexec_command, python_of

NUMBERS = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size)


def numbers_before_init():
    hvd.shutdown()
    assert not hvd.is_initialized()
    for number in (*NUMBERS, hvd.is_homogeneous, hvd.mpi_threads_supported, hvd.barrier):
        with pytest.raises(ValueError, match=r"call hvdlite.init\(\) first"):
            number()
    for call in (hvd.allreduce, hvd.allgather, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="init"):
            call(torch.ones(1))
    assert hvd.global_process_set.size() is None
    assert not hvd.gloo_built()
    assert hvd.mpi_built()


@pytest.mark.ranks(1)
@pytest.mark.mpis("openmpi")
def test_before_init_the_numbers_are_value_errors(world):
    world.run(numbers_before_init)


def all_numbers():
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    return (*(number() for number in NUMBERS), hvd.is_homogeneous())


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,1", "2,2")
def test_the_numbers_follow_from_who_is_where(world):
    found = world.run(all_numbers)
    by_layout = {
        None: [(r, world.size, r, world.size, 0, 1, True) for r in range(world.size)],
        "2,1": [(0, 3, 0, 2, 0, 2, False), (1, 3, 1, 2, 0, 1, False), (2, 3, 0, 1, 1, 2, False)],
        "2,2": [
            (0, 4, 0, 2, 0, 2, True),
            (1, 4, 1, 2, 0, 2, True),
            (2, 4, 0, 2, 1, 2, True),
            (3, 4, 1, 2, 1, 2, True),
        ],
    }
    assert found == by_layout[world.hosts]


def shuts_down_and_begins_again():
    for _ in range(5):
        hvd.init()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3
        assert hvd.allreduce(torch.ones(70_000), op=hvd.Sum)[-1] == hvd.size()
        hvd.shutdown()
        hvd.shutdown()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_init_works_again_after_shutdown(world):
    world.run(shuts_down_and_begins_again)


def leaves():
    hvd.init()
    rank = hvd.rank()
    hvd.barrier()
    if rank == 1:
        pending = hvd.allreduce_async(torch.ones(2), name="never matched")
        hvd.shutdown()
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(pending)
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 on .* has left"):
            hvd.allreduce(torch.ones(2), name="nobody answers")
        hvd.shutdown()
    hvd.init()
    hvd.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
def test_what_needs_a_rank_that_has_left_fails_and_names_it(world):
    world.run(leaves)


def part_of_the_world():
    from mpi4py import MPI

    hvd.shutdown()
    everyone = MPI.COMM_WORLD
    evens = [r for r in range(everyone.size) if r % 2 == 0]
    odds = [r for r in range(everyone.size) if r % 2]
    mine = evens if everyone.rank % 2 == 0 else odds
    hvd.init(comm=mine)
    assert (hvd.rank(), hvd.size()) == (mine.index(everyone.rank), len(mine))
    assert hvd.allgather(torch.tensor([everyone.rank])).tolist() == mine
    hvd.shutdown()
    backwards = everyone.Split(0, -everyone.rank)
    hvd.init(comm=backwards)
    assert hvd.allgather(torch.tensor([everyone.rank])).tolist() == list(
        reversed(range(everyone.size))
    )
    hvd.shutdown()
    with pytest.raises(ValueError, match="does not contain this process"):
        hvd.init(comm=[(everyone.rank + 1) % everyone.size])
    with pytest.raises(ValueError, match="expected distinct ranks"):
        hvd.init(comm=[everyone.rank, everyone.rank])
    assert not hvd.is_initialized()


@pytest.mark.ranks(3)
def test_a_list_of_ranks_or_a_communicator_is_the_world(world):
    world.run(part_of_the_world)


def refuses(variable):
    with pytest.raises(ValueError, match=f"{variable}="):
        hvd.init()
    assert not hvd.is_initialized()


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
@pytest.mark.parametrize(
    "knobs", [{"HVDLITE_BLOCK_BYTES": "a lot"}, {"HOROVOD_FUSION_THRESHOLD": "64MB"}]
)
def test_a_knob_that_cannot_be_parsed_is_an_error_of_init(world, knobs):
    world.run(refuses, *knobs, knobs=knobs)


def pretends_wrongly():
    with pytest.raises(ValueError, match=r"HVDLITE_HOST_RANKS adds up to 3, but .* is 2"):
        hvd.init()


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_pretended_hosts_that_do_not_add_up_are_an_error(world):
    world.run(pretends_wrongly, knobs={"HVDLITE_HOST_RANKS": "2,1"})


def cannot_share():
    from hvdlite.world.teams import shared_memory

    hvd.shutdown()
    before = shared_memory._memfd, shared_memory._named_file

    def fails(size_bytes):
        raise OSError("not here")

    shared_memory._memfd = fails
    try:
        hvd.init()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum)[0] == hvd.size(), "a file in /dev/shm"
        hvd.shutdown()
        shared_memory._named_file = fails
        hvd.init()
        assert hvd.local_size() == hvd.size()
        assert hvd.allreduce(torch.ones(9999), op=hvd.Sum)[0] == hvd.size(), "by messages"
        assert worlds.current().team.engine.counters()["data_messages"] > 0
        hvd.shutdown()
    finally:
        shared_memory._memfd, shared_memory._named_file = before


@pytest.mark.ranks(3)
def test_ranks_of_a_host_that_cannot_share_memory_send_messages(world):
    world.run(cannot_share)


def too_little_memory():
    from hvdlite.world.teams import shared_memory

    hvd.shutdown()
    before = shared_memory.lack_of_memory

    def lacks(*_, **__):
        return "the ranks of this host need more"

    shared_memory.lack_of_memory = lacks
    try:
        with pytest.raises(hvd.HvdliteError, match="need more"):
            hvd.init()
    finally:
        shared_memory.lack_of_memory = before
    hvd.init()
    hvd.barrier()


@pytest.mark.ranks(2)
def test_too_little_memory_is_an_error_on_every_rank(world):
    world.run(too_little_memory)


def python(code, *before):
    return run_program([*before, sys.executable, "-c", code], limit_s=60)


def test_importing_it_starts_neither_mpi_nor_a_thread():
    code = """
import os, sys, torch
before = len(os.listdir("/proc/self/task"))
import hvdlite, hvdlite.torch
assert len(os.listdir("/proc/self/task")) == before
assert "mpi4py" not in sys.modules
"""
    assert python(code).code == 0


def test_without_a_launcher_the_world_is_one_and_needs_no_mpi():
    code = """
import sys
sys.modules["mpi4py"] = None
import torch, hvdlite.torch as hvd
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
model = torch.nn.Linear(3, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
hvd.broadcast_parameters(model.state_dict(), 0)
hvd.broadcast_optimizer_state(optimizer, 0)
model(hvd.allreduce(torch.ones(4, 3))).sum().backward()
optimizer.step()
assert hvd.allgather_object("x") == ["x"]
hvd.barrier()
sys.exit(3)
"""
    finished = python(code)
    assert finished.code == 3, finished
    assert not finished.stderr


def test_a_launcher_of_another_mpi_is_an_error_that_names_both():
    if not python_of("mpich").exists():
        lacking("no mpich; `make build`")
    command = [*mpiexec_command("mpich", 2), python_of("openmpi"), "-c"]
    finished = run_program([*command, "import hvdlite; hvdlite.init()"], limit_s=60)
    assert finished.code != 0
    text = finished.stdout + finished.stderr
    assert "started 2 processes, but mpi4py uses" in text, finished
    assert "an mpiexec of the MPICH family" in text
    assert "PMI_SIZE=2" in text
    assert "Open MPI v" in text


def test_a_launcher_without_mpi4py_is_an_error_that_says_what_to_install():
    code = "import sys; sys.modules['mpi4py'] = None; import hvdlite; hvdlite.init()"
    finished = python(code, "env", "PMI_SIZE=2")
    assert finished.code == 1
    assert "LaunchError" in finished.stderr
    assert "install mpi4py" in finished.stderr


def thread_counts():
    before = os.environ.pop("OMP_NUM_THREADS", None)
    hvd.shutdown()
    torch.set_num_threads(len(os.sched_getaffinity(0)) + 2)
    hvd.init()
    found = torch.get_num_threads()
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before
    torch.set_num_threads(1)
    return found


@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
def test_the_ranks_of_a_host_divide_its_cores(world):
    found = world.run(thread_counts)
    assert all(1 <= threads <= max(1, len(os.sched_getaffinity(0)) // 2) for threads in found)


@pytest.mark.ranks(1)
def test_with_virtual_ranks_torch_computes_in_one_thread_on_any_number_of_ranks(world):
    assert world.run(thread_counts, knobs={"HVDLITE_DETERMINISTIC": "virtual:2"}) == [1]
