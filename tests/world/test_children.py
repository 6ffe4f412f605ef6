"""Processes that a rank starts or forks."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hvdlite as hvd
from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.worlds import MPIS, mpiexec_command, python_of

LOOK = """
import sys, hvdlite as hvd
hvd.init()
hvd.init()
print(hvd.rank(), hvd.size(), "mpi4py.MPI" in sys.modules)
"""


class AsksForItsRank(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        hvd.init()
        try:
            hvd.allreduce(torch.ones(1))
        except hvd.HorovodInternalError as error:
            refused = "forked from rank" in str(error)
        return torch.tensor([hvd.rank(), hvd.size(), refused, os.getpid()])


def loads_data():
    hvd.init()
    hvd.allreduce(torch.ones(1))
    loader = DataLoader(
        AsksForItsRank(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    for _ in range(2):
        for batch in loader:
            assert (batch[:, 0] == hvd.rank()).all()
            assert (batch[:, 1] == hvd.size()).all()
            assert batch[:, 2].all()
            assert (batch[:, 3] != os.getpid()).all()
        hvd.barrier()


@pytest.mark.wide_in(1)
@pytest.mark.ranks(1, 2)
def test_a_forked_data_loader_worker_knows_its_rank_and_may_not_communicate(world):
    world.run(loads_data)


def looks(queue):
    hvd.init()
    queue.put((hvd.rank(), hvd.size(), "mpi4py.MPI" in sys.modules))


def starts_processes(method):
    hvd.init()
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=looks, args=(queue,))
    child.start()
    found = queue.get()
    child.join()
    hvd.barrier()
    return found, child.exitcode


@pytest.mark.wide_in("mpich")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.wide)])
def test_a_process_that_a_rank_starts_is_a_world_of_one_without_mpi(world, method):
    assert world.run(starts_processes, method) == [((0, 1, False), 0)] * 2


def starts_a_program(lost):
    """The program inherits what hvdrun sets for torch, but none of the variables in `lost`."""
    hvd.init()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(lost)}
    finished = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**environ, "WORLD_SIZE": str(hvd.size()), "RANK": str(hvd.rank())},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    hvd.barrier()
    return finished.stdout, finished.stderr.count("it is a world of one")


@pytest.mark.wide_in("openmpi")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "lost", [("none",), pytest.param(("OMPI_", "PMI", "SLURM_"), marks=pytest.mark.wide)]
)
def test_a_program_that_a_rank_runs_is_a_world_of_one_and_says_so_once(world, lost):
    assert world.run(starts_a_program, lost) == [("0 1 False\n", 1)] * 2


CHILD_THAT_EXITS = """
import os, sys, torch, hvdlite as hvd
hvd.init()
hvd.start_timeline(sys.argv[1])
for leave, code in ((bool, 0), (bool, 5), (hvd.stop_timeline, 5), (hvd.shutdown, 0)):
    child = os.fork()
    if child == 0:
        leave()
        sys.exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    hvd.allreduce(torch.ones(1), name=f"after {leave.__name__}")
hvd.stop_timeline()
print("through")
"""


@pytest.mark.wide_in("mpich")
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_nothing_of_the_job_ends_with_a_forked_child(mpi, tmp_path):
    """And the child prints nothing when it ends."""
    if not python_of(mpi).exists():
        lacking(f"no {mpi}; `make build`")
    path = tmp_path / "timeline.json"
    finished = run_program(
        [*mpiexec_command(mpi, 2), python_of(mpi), "-c", CHILD_THAT_EXITS, path], limit_s=60
    )
    assert finished.code == 0, finished
    assert finished.stdout.count("through") == 2
    assert "Traceback" not in finished.stderr
    titles = {event["name"] for event in json.loads(path.read_text())}
    assert titles >= {f"allreduce after {name}" for name in ("bool", "stop_timeline", "shutdown")}


HELPERS = """
import os, sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing
import hvdlite as hvd

def helps(rank, path):
    dist.init_process_group("hvdlite", init_method=f"file://{path}", rank=rank, world_size=2)
    x = torch.full((1,), rank + 1.0)
    dist.all_reduce(x)
    assert x.item() == 3
    dist.destroy_process_group()

if __name__ == "__main__":
    hvd.init()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(helps, (os.path.join(folder, "store"),), 2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
"""


@pytest.mark.long
@pytest.mark.parametrize("mpi", MPIS)
def test_helpers_of_a_rank_can_be_a_process_group_of_the_worlds_size(mpi, tmp_path):
    """They are not the task that their variables name: MPI has it already."""
    program = tmp_path / "helpers.py"
    program.write_text(HELPERS)
    done = run_program([*mpiexec_command(mpi, 2), python_of(mpi), program], 120)
    assert done.code == 0, done
