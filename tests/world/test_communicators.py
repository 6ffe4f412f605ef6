"""Communicators are freed, and nothing that was sent on them reaches the next world."""

import contextlib

import pytest
import torch

import hvdlite as hvd
from hvdlite.world import world as worlds
from hvdlite.world.bootstrap import communicators
from tests.core.matching.test_joined import everyone


def assert_collectives_work():
    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) / 2
    for count in (3, 5000):
        assert hvd.allreduce(torch.full((count,), rank + 1.0), op=hvd.Sum).eq(total).all()
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def held_after_each(cycles):
    """The number of communicators after each world that had process sets and removed one."""
    hvd.shutdown()
    last, held = everyone().size - 1, []
    for _ in range(cycles):
        hvd.init(process_sets=[[0]])
        hvd.remove_process_set(hvd.add_process_set([1, last][last == 1 :]))
        assert_collectives_work()
        hvd.shutdown()
        held.append(communicators.num_held())
    return held


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1", "2,1")
def test_a_world_frees_the_communicators_of_the_one_before(world):
    for held in world.run(held_after_each, 12, limit_s=120):
        assert len(set(held[1:])) == 1, held


def parts_of_the_world_between():
    """A rank outside the next world can't free the communicators that it shares with members."""
    hvd.shutdown()
    rank, held = everyone().rank, []
    for _ in range(3):
        hvd.init()
        assert_collectives_work()
        hvd.shutdown()
        for ranks in ([0], [1, 2]):
            if rank in ranks:
                hvd.init(comm=ranks)
                assert_collectives_work()
                hvd.shutdown()
        held.append(communicators.num_held())
    return held


@pytest.mark.ranks(3)
def test_communicators_wait_for_a_world_of_all_their_members(world):
    for held in world.run(parts_of_the_world_between):
        assert len(set(held[1:])) == 1, held


def leaves_messages_behind(cycles):
    """To a rank that has left, on its engine's communicator and with the tags that it uses."""
    kept = []
    for cycle in range(cycles):
        hvd.init()
        rank, last = hvd.rank(), hvd.size() - 1
        comm = worlds.current().team.comms()[0]
        assert_collectives_work()
        if rank == last:
            hvd.shutdown()
        everyone().Barrier()
        if rank != last:
            for tag in (1, 16, 24):
                kept.append(torch.full((8,), 77 + cycle, dtype=torch.uint8).numpy())
                comm.Isend(kept[-1], last, tag)
        hvd.shutdown()
    hvd.init()
    assert_collectives_work()


@pytest.mark.ranks
@pytest.mark.hosts("1,1", "2,1")
def test_no_message_of_a_world_reaches_the_next_one(world):
    world.run(leaves_messages_behind, 6, limit_s=120)


def too_many():
    hvd.init()
    from mpi4py import MPI

    taken = []
    with contextlib.suppress(MPI.Exception):
        while True:
            taken.append(everyone().Dup())
    with pytest.raises(hvd.HvdliteError, match="create another communicator") as caught:
        hvd.add_process_set([0, 1])
    for comm in taken:
        comm.Free()
    hvd.remove_process_set(hvd.add_process_set([0, 1][: hvd.size() - 1]))
    assert_collectives_work()
    return str(caught.value)


@pytest.mark.ranks(3)
@pytest.mark.mpis("mpich")
def test_an_mpi_that_has_no_room_for_a_communicator_is_an_error_that_says_so(world):
    texts = world.run(too_many)
    assert all("free your own communicators" in text for text in texts)


def begins_again(cycles):
    hvd.shutdown()
    for _ in range(cycles):
        hvd.init()
        hvd.barrier()
        hvd.shutdown()


@pytest.mark.wide
@pytest.mark.ranks
@pytest.mark.hosts("1,1")
@pytest.mark.mpis("mpich")
def test_init_and_shutdown_can_be_repeated_more_often_than_an_mpi_has_communicators(world):
    world.run(begins_again, 1100, limit_s=600)
