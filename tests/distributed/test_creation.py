"""How process groups are made, and how they end."""

import gc
import itertools
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hvdlite as hvd
from hvdlite.distributed import HvdliteProcessGroup
from hvdlite.errors import LaunchError
from hvdlite.world import world
from hvdlite.world.bootstrap import communicators
from tests.distributed.default_group import begin, in_a_group, rank_and_size

pytestmark = [pytest.mark.ranks(2, 3)]


def adds_up(group, expected):
    """Every member adds its world rank."""
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(expected), (tensor, expected)


def subsets(size):
    every = [itertools.combinations(range(size), count) for count in range(1, size + 1)]
    return [list(ranks) for ranks in itertools.chain(*every)]


@in_a_group
def shapes(rank, size):
    kept = []
    for ranks in subsets(size):
        group = dist.new_group(ranks)
        if rank in ranks:
            assert dist.get_group_rank(group, rank) == ranks.index(rank)
            kept.append((group, ranks))
    # Equal ranks again, which differ in what other groups they are in.
    kept += [(dist.new_group(list(range(size))), range(size)) for _ in range(3)]
    for group, ranks in reversed(kept):
        adds_up(group, ranks)
    for group, ranks in kept:
        if ranks[0]:
            dist.destroy_process_group(group)
    for group, ranks in kept:
        if not ranks[0]:
            adds_up(group, ranks)
    adds_up(None, range(size))


def test_groups_of_any_ranks_are_made_and_destroyed(world, tmp_path):
    world.run(shapes, tmp_path)


@in_a_group
def local(rank, size):
    """Only members call it, each pair of ranks in the order of its own."""
    pairs = [[a, b] for a in range(size) for b in range(a + 1, size)]
    for _ in range(2):
        for ranks in pairs:
            if rank in ranks:
                group = dist.new_group(ranks, use_local_synchronization=True)
                adds_up(group, ranks)


def test_only_members_make_a_group_with_local_synchronization(world, tmp_path):
    world.run(local, tmp_path)


@in_a_group
def parts(rank, size):
    whole = dist.group.WORLD
    for ranks in [[0, 1], [1, 0], [size - 1, 0], [1, 0]]:
        if rank not in ranks:
            if rank % 2:
                assert whole.split(ranks) is None  # others need not call it
            continue
        part = whole.split(ranks)
        assert (part.rank(), part.size()) == (ranks.index(rank), 2)
        tensor = torch.tensor([rank])
        part.broadcast(tensor, 0).wait()
        assert tensor.item() == ranks[0]
        inner = part.split([part.rank()])
        assert (inner.rank(), inner.size()) == (0, 1)
        inner.shutdown()
        part.shutdown()


def test_split_makes_a_group_of_members_in_their_order(world, tmp_path):
    world.run(parts, tmp_path)


def mixed(folder, first, second):
    """Groups of two backends in one process."""
    hvd.shutdown()  # of an earlier test
    rank, size = rank_and_size()
    dist.init_process_group(
        first,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    try:
        if second == "hvdlite" and size > 2 and rank:
            with pytest.raises(LaunchError, match=f"has 2 of {size} ranks.*hvdlite.init"):
                dist.new_group([1, 2], backend=second, use_local_synchronization=True)
        for ranks in [list(range(size)), [0, size - 1], [size - 1]]:
            group = dist.new_group(ranks, backend=second)
            if rank in ranks:
                assert dist.get_backend(group) == second
                assert isinstance(group, HvdliteProcessGroup) == (second == "hvdlite")
                adds_up(group, ranks)
            adds_up(None, range(size))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("first", "second"), [("gloo", "hvdlite"), ("hvdlite", "gloo")])
def test_groups_of_hvdlite_and_of_gloo_work_beside_each_other(world, tmp_path, first, second):
    world.run(mixed, tmp_path, first, second)


def footprint():
    gc.collect()
    resident = Path("/proc/self/statm").read_text().split()[1]
    maps = Path("/proc/self/maps").read_text().count("\n")
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        communicators.num_held(),
        maps,
        int(resident),
    )


def again(folder, times):
    """Nothing of earlier process groups stays."""
    hvd.shutdown()  # of an earlier test
    seen = []
    for number in range(times):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        begin(place)
        rank, size = rank_and_size()
        group = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            adds_up(group, {0, size - 1})
        dist.all_reduce(torch.ones(200_000), async_op=True).get_future().wait()
        dist.barrier()
        dist.destroy_process_group()
        assert not world.is_initialized()
        seen.append(footprint())
    warm, last = seen[2], seen[-1]
    assert last[0] <= warm[0], seen
    assert last[1] <= warm[1], seen
    assert last[2] <= warm[2] + 4, seen
    assert last[3] <= warm[3] + 8, seen


def test_init_and_destroy_again_and_again_leave_nothing(world, tmp_path):
    world.run(again, tmp_path, 8)


def ends(folder, how):
    rank, size = rank_and_size()
    begin(folder)
    group = dist.new_group(timeout=timedelta(seconds=60))
    work = None
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    dist.barrier()
    if rank == size - 1:
        getattr(group, how)()
        getattr(group, how)()  # again: nothing
    if work is not None:
        with pytest.raises(RuntimeError, match=f"rank {size - 1} .*has left"):
            work.wait()
    adds_up(None, range(size))
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_a_group_that_a_rank_leaves_fails_and_others_go_on(world, tmp_path, how):
    world.run(ends, tmp_path, how)


@in_a_group
def beside(rank, size):
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    adds_up(None, range(size))
    dist.destroy_process_group()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()
    dist.init_process_group("hvdlite", store=dist.HashStore(), rank=0, world_size=1)


def test_the_api_takes_the_same_world_and_keeps_it(world, tmp_path):
    world.run(beside, tmp_path)


@in_a_group
def threads(rank, size):
    """Threads make groups at the same time, each rank in an order of its own."""
    whole, found = dist.group.WORLD, {}
    pairs = [[a, b] for a in range(size) for b in range(size) if a != b]
    mine = [ranks for ranks in pairs if rank in ranks]

    def make(ranks):
        part = whole.split(ranks)
        tensor = torch.ones(1)
        part.allreduce(tensor).wait()
        found[tuple(ranks)] = tensor.item()
        part.shutdown()

    if rank % 2:
        mine.reverse()
    running = [threading.Thread(target=make, args=(ranks,)) for ranks in mine]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert found == dict.fromkeys(map(tuple, mine), 2.0)


@in_a_group
def incomplete(rank, size):
    soon = timedelta(milliseconds=300)
    if rank:
        with pytest.raises(LaunchError, match=r"rank 0 (on .*)?did not come"):
            dist.new_group(timeout=soon)
    dist.barrier()
    if rank == 0:  # when the others have given up
        with pytest.raises(LaunchError, match=r"given up|did not come"):
            dist.new_group(timeout=soon)
    dist.barrier()
    adds_up(dist.new_group(), range(size))


def test_a_group_to_which_a_rank_does_not_come_fails_and_names_it(world, tmp_path):
    world.run(incomplete, tmp_path)


def test_threads_make_groups_at_the_same_time(world, tmp_path):
    world.run(threads, tmp_path)
