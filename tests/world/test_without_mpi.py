"""Worlds of one host without MPI, started by whatever starts processes for torch.distributed."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import starting
from hvdlite.world.bootstrap import communicators
from hvdlite.world.teams import groups
from tests.harness.programs import run_program
from tests.harness.without_mpi import job_without_mpi, run_ranks
from tests.harness.worlds import mpiexec_command, python_of

LIMIT_S = 120


@pytest.fixture
def job():
    with job_without_mpi() as variables:
        yield variables


API = """
import os, sys, torch, hvdlite as hvd
for era in range(3):
    hvd.init()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert not hvd.mpi_enabled() and hvd.global_process_set.mpi_comm is None
    for count in (3, 300000):
        x = torch.full((count,), 2.0**rank)
        assert hvd.allreduce(x, op=hvd.Sum).eq(2**size - 1).all()
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
    assert hvd.broadcast_object({"from": rank}, size - 1) == {"from": size - 1}
    two = hvd.add_process_set([0, size - 1])
    if two.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=two).item() == 2
        assert two.mpi_comm is None
    hvd.remove_process_set(two)
    hvd.shutdown()
    open_now = len(os.listdir("/proc/self/fd"))  # the first world opens the Store
    assert era == 0 or open_now == last, (last, open_now)
    last = open_now
print("mpi4py.MPI" in sys.modules)
"""


def test_the_variables_of_torch_make_a_world_again_and_again(job):
    for finished in run_ranks(API, 3, job):
        assert (finished.code, finished.stdout) == (0, "False\n"), finished


STEP = """
import torch, hvdlite as hvd
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size() == 2
"""


@pytest.mark.wide
def test_srun_without_pmi_starts_ranks_that_have_the_variables_of_torch(job):
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    for finished in run_ranks(STEP, 2, {**job, **step}):
        assert finished.code == 0, finished


LATE = """
import datetime, torch.distributed as dist, hvdlite as hvd
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
if dist.get_rank() == 0:
    try:
        hvd.init()
    except hvd.errors.LaunchError as error:
        print(error)
dist.barrier()
"""


def test_init_waits_for_as_long_as_the_process_group(job):
    first, second = run_ranks(LATE, 2, job)
    assert first.stdout.startswith("rank 1 of 2 did not come to init within 2 s"), first
    assert second.code == 0 or "Timed out" in second.stderr, second


CHILD = """
import subprocess, sys, hvdlite as hvd
hvd.init()
print(hvd.rank(), hvd.size(), flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-c", PROGRAM, "child"], check=True)
    hvd.barrier()
"""


def test_a_child_of_such_a_rank_is_a_world_of_one(job):
    code = f"PROGRAM = {CHILD!r}\n{CHILD}"
    for rank, finished in enumerate(run_ranks(code, 2, job)):
        assert (finished.code, finished.stdout) == (0, f"{rank} 2\n0 1\n"), finished
        assert "it is a world of one" in finished.stderr


FAILS = """
import sys, time, torch, hvdlite as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    END
try:
    hvd.allreduce(torch.ones(1), name="never")
except hvd.HorovodInternalError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "rank 1 on .* has died"),
        ("sys.exit(0)", "rank 1 on .* has left"),
        pytest.param("raise KeyError", "rank 1 on .* has died", marks=pytest.mark.long),
        pytest.param("sys.exit(3)", "rank 1 on .* has died", marks=pytest.mark.long),
    ],
    ids=["killed", "sys.exit(0)", "exception", "sys.exit(3)"],
)
def test_a_rank_that_ends_fails_the_others_by_name(job, end, text):
    of_rank_0, of_rank_1 = run_ranks(FAILS.replace("END", end), 2, job)
    assert of_rank_0.code == 0
    assert re.search(text, of_rank_0.stdout), of_rank_0
    assert (of_rank_1.code == 0) == ("(0)" in end)


def under_spawn(rank, size, path):
    """With a process group of Gloo; then groups."""
    assert "HVDLITE_RANK_PROCESS" not in os.environ
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(path, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_size()) == (rank, size, size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    makes_groups()
    # The same world serves a process group; another rank in it does not fit.
    starting.begin_with_store(dist.HashStore(), rank, size, 1.0)
    with pytest.raises(hvd.HvdliteError, match=rf"has it as rank {rank} of {size}"):
        starting.begin_with_store(dist.HashStore(), (rank + 1) % size, size, 1.0)
    dist.barrier()
    hvd.shutdown()
    with pytest.raises(ValueError, match="not initialized"):
        groups.make_group([rank], "none", 1.0)
    # A world that only groups use ends with the last of them.
    for turn in range(2):
        store = dist.PrefixStore(f"{turn}", dist.distributed_c10d._get_default_store())
        starting.begin_with_store(store, rank, size, LIMIT_S)
        made = [groups.make_group(range(size), f"all {n}", LIMIT_S) for n in range(2)]
        broadcast_in(made[1])
        groups.close_group(made[0])
        assert hvd.is_initialized()
        groups.close_group(made[1])
        assert not hvd.is_initialized()
    dist.destroy_process_group()


def spawns(path, size=3):
    torch.multiprocessing.spawn(under_spawn, (size, path), size)


def broadcast_in(team, name="b"):
    """From each member in turn: tells whether the members are those, in this order."""
    for root in range(team.size):
        x = torch.full((70_000,), float(team.ranks[team.rank]))
        what = (_core.BROADCAST, f"{name}{root}", True, _core.FLOAT32, x, x, 0, root)
        assert team.engine.post(_core.posting(*what)).wait() is None
        assert x.eq(team.ranks[root]).all()


def num_descriptors() -> int:
    """Without those by which an engine watches processes, which it opens while it waits."""
    opened = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            opened.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("pidfd" not in target for target in opened)


def makes_groups():
    rank, size = hvd.rank(), hvd.size()
    before = num_descriptors()
    # Overlapping pairs, which the ranks make in different orders; equal groups; groups of one.
    for ranks in ((1, 0), (0, 1)):
        if rank in ranks:
            team = groups.make_group(ranks, "pair", LIMIT_S)
            assert (team.ranks, team.rank) == (ranks, ranks.index(rank))
            broadcast_in(team)
            groups.close_group(team)
    backwards = tuple(range(size))[::-1]
    teams = [groups.make_group(backwards, f"all {n}", LIMIT_S) for n in range(3)]
    alone = groups.make_group([rank], "alone", LIMIT_S)
    assert (alone.ranks, alone.rank, alone.size) == ((rank,), 0, 1)
    for team in (*teams[::-1], alone):
        broadcast_in(team)
    if rank == 0:  # a group in which a member has left is broken, the others are not
        groups.close_group(teams[1])
    else:
        x = torch.ones(1)
        what = (_core.BROADCAST, "after", True, _core.FLOAT32, x, x, 0, 0)
        problem = teams[1].engine.post(_core.posting(*what)).wait()
        assert "rank 0 on" in problem
        assert "has left" in problem
    broadcast_in(teams[0], "c")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    if rank == size - 1:
        with pytest.raises(hvd.HvdliteError, match=r"rank 0 did not come within 0\.2 s"):
            groups.make_group((0, rank), "not made", 0.2)
    for wrong in ([], [rank, rank], [rank, size], [(rank + 1) % size]):
        with pytest.raises(ValueError, match="a group of ranks"):
            groups.make_group(wrong, "wrong", LIMIT_S)
    for team in (*teams, alone, alone):
        groups.close_group(team)
    del team, alone, teams
    gc.collect()
    assert num_descriptors() == before


def test_spawned_processes_with_a_process_group_are_a_world_with_groups(tmp_path):
    code = f"from {__name__} import spawns; spawns({str(tmp_path / 'store')!r})"
    done = run_program([sys.executable, "-c", code], LIMIT_S)
    assert done.code == 0, done


def makes_groups_under_mpi():
    hvd.init()
    makes_groups_of_some()
    hvd.shutdown()
    hvd.init()  # frees what the groups have left
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def makes_groups_of_some():
    rank, size = hvd.rank(), hvd.size()
    pairs = [(2, 0), (1, 2), (1, 0)]
    teams = [groups.make_group(pair, f"{pair}", LIMIT_S) for pair in pairs if rank in pair]
    teams += [groups.make_group(range(size)[::-1], f"all {n}", LIMIT_S) for n in range(2)]
    teams.append(groups.make_group([rank], "alone", LIMIT_S))
    for team in teams:
        broadcast_in(team)
    hvd.barrier()
    for team in teams if rank else teams[::-1]:  # in any order
        groups.close_group(team)
    held = []
    for turn in range(4):
        pair = [groups.make_group(range(size), f"again {turn} {n}", LIMIT_S) for n in range(2)]
        for team in pair:
            broadcast_in(team)
        for team in pair if rank else pair[::-1]:
            groups.close_group(team)
        held.append(communicators.num_held())
    assert held[1:] == [held[1]] * 3, "groups that follow each other take no more room"


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,2")
def test_under_mpi_groups_are_made_by_their_members_alone(world):
    world.run(makes_groups_under_mpi)


def the_world():
    """What each rank of MPI is in the world, and that sums and memory work in it."""
    from mpi4py import MPI

    hvd.init()
    assert hvd.allreduce(torch.ones(70_000), op=hvd.Sum).eq(hvd.size()).all()
    gathered = hvd.allgather(torch.tensor([MPI.COMM_WORLD.Get_rank()])).tolist()
    return hvd.rank(), hvd.local_rank(), gathered


def orders(ranks: Sequence[object]):
    from mpi4py import MPI

    own = ranks[MPI.COMM_WORLD.Get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(len(ranks)))
        patch.setenv("RANK", str(own))
        try:
            hvd.shutdown()
            return the_world()
        except hvd.HvdliteError as error:
            return str(error)
        finally:
            hvd.shutdown()


@pytest.mark.ranks(3)
def test_where_it_differs_from_mpis_rank_RANK_orders_the_world(world):
    assert world.run(orders, (2, 0, 1)) == [(2, 2, [1, 2, 0]), (0, 0, [1, 2, 0]), (1, 1, [1, 2, 0])]
    assert world.run(orders, (0, 1, 2)) == [(n, n, [0, 1, 2]) for n in range(3)]
    for text in world.run(orders, (1, 0, 1)):
        assert "RANK is 1, 0, 1 on the ranks 0 to 2 of MPI" in text
    assert world.run(orders, (1, 0, "")) == [(n, n, [0, 1, 2]) for n in range(3)]


# ---- torchrun ----

TRAIN = """
import os, sys, torch, hvdlite as hvd
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and "fail" in sys.argv:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        raise KeyError("the first time")
    hvd.allreduce(torch.ones(1), name="in vain")
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
hvd.broadcast_parameters(model.state_dict(), 0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
)
for step in range(4):
    optimizer.zero_grad()
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {flat.double().sum().item():.12f}\\n")
"""


def torchrun(code: str, folder: Path, size: int, *options: str, arguments: Sequence[str] = ()):
    script = folder / "train.py"
    script.write_text(code)
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return [*command, "--nproc-per-node", str(size), *options, script, *arguments]


@pytest.mark.long
def test_under_torchrun_it_trains_as_under_mpi(tmp_path):
    done = run_program(torchrun(TRAIN, tmp_path, 2), LIMIT_S)
    assert done.code == 0, done
    mpi = run_program(
        [*mpiexec_command("openmpi", 2), python_of("openmpi"), tmp_path / "train.py"], LIMIT_S
    )
    assert sorted(done.stdout.splitlines()) == sorted(mpi.stdout.splitlines())
    assert len({line.split(":")[1] for line in done.stdout.splitlines()}) == 1
    assert [line.split(":")[0] for line in sorted(done.stdout.splitlines())] == [
        f"rank {rank} of 2" for rank in range(2)
    ]


@pytest.mark.long
def test_torchrun_restarts_a_job_of_which_a_rank_has_failed(tmp_path):
    command = torchrun(TRAIN, tmp_path, 2, "--max-restarts", "1", arguments=["fail"])
    done = run_program(command, LIMIT_S)
    assert done.code == 0, done
    assert "KeyError: 'the first time'" in done.stderr
    assert sorted(line.split(":")[0] for line in done.stdout.splitlines()) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]


LATER_GROUP = """
import torch, torch.distributed as dist, hvdlite as hvd
hvd.init()
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == hvd.size() == 2
dist.destroy_process_group()
hvd.barrier()
"""


@pytest.mark.long
def test_two_jobs_run_at_once_and_a_process_group_can_follow(tmp_path):
    jobs = []
    for number in range(2):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        command = torchrun(LATER_GROUP, folder, 2)
        jobs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    try:
        for job in jobs:
            assert job.communicate(timeout=LIMIT_S)[1].count("Traceback") == 0
            assert job.returncode == 0
    finally:
        for job in jobs:
            job.terminate()
            job.wait()
