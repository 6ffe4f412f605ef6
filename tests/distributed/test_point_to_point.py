"""Sends and receives of a process group."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.distributed.default_group import in_a_group

pytestmark = [pytest.mark.ranks(2, 3)]

SOON = timedelta(milliseconds=100)
# One that travels with its announcement, one of several blocks.
COUNTS = (1, 300_001)


def of(sender, receiver, tag=0, count=3):
    return torch.arange(count) + 1000 * sender + 100 * receiver + 10 * tag


@in_a_group
def messages(rank, size):
    following, previous = (rank + 1) % size, (rank - 1) % size
    for count in COUNTS:
        # By tag, in the opposite order; by sender; of a tensor that is not contiguous.
        sends = [
            dist.isend(of(rank, following, tag, count), following, tag=tag) for tag in (7, 5, 0)
        ]
        for tag in (0, 5, 7):
            found = torch.zeros(count, 2, dtype=torch.int64)[:, 0]
            assert dist.recv(found, previous, tag=tag) == previous
            assert found.tolist() == of(previous, rank, tag, count).tolist()
        for work in sends:
            assert work.wait()
        # From any source.
        if rank:
            dist.send(of(rank, 0, 3, count), 0, tag=3)
        else:
            seen = set()
            for _ in range(1, size):
                found = torch.zeros(count, dtype=torch.int64)
                source = dist.recv(found, tag=3)
                assert found.equal(of(source, 0, 3, count))
                seen.add(source)
            assert seen == set(range(1, size))
    sub = dist.new_group([size - 2, size - 1])
    if rank == size - 2:
        dist.send(torch.tensor([5]), group=sub, group_dst=1)
    elif rank == size - 1:
        found = torch.zeros(1, dtype=torch.int64)
        assert dist.recv(found, group=sub) == size - 2
        assert found.item() == 5


def test_messages_are_matched_by_sender_and_tag(world, tmp_path):
    world.run(messages, tmp_path)


@in_a_group
def batches(rank, size):
    for count in COUNTS:
        found = [torch.zeros(count, dtype=torch.int64) for _ in range(size)]
        sent = [of(rank, other, count=count) for other in range(size)]
        operations = [dist.P2POp(dist.irecv, tensor, source) for source, tensor in enumerate(found)]
        operations += [dist.P2POp(dist.isend, sent[to], to) for to in reversed(range(size))]
        operations = [op for op in operations if op.peer != rank]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for source, tensor in enumerate(found):
            assert source == rank or tensor.equal(of(source, rank, count=count))
    objects = [None, None]
    if rank == 0:
        dist.send_object_list([{"a": 1}, "two"], dst=1)
    elif rank == 1:
        assert dist.recv_object_list(objects, src=0) == 0
        assert objects == [{"a": 1}, "two"]


def test_messages_are_posted_in_batches(world, tmp_path):
    world.run(batches, tmp_path)


@in_a_group
def late(rank, size):
    group = dist.new_group()
    found, big = torch.zeros(2), torch.ones(300_001)
    if rank == 0:
        for work in (
            dist.irecv(found, 1, group=group, tag=4),
            dist.irecv(found, group=group, tag=4),
            dist.isend(big, 1, group=group, tag=4),
        ):
            with pytest.raises(RuntimeError, match=r"timed out.*rank|timed out"):
                work.wait(SOON)
            assert work.is_completed()
            assert not work.is_success()
            with pytest.raises(RuntimeError, match="timed out"):
                work.wait()
        assert not found.any()
        dist.barrier(group)
        # A message that comes after the time was over goes to the next receive.
        assert dist.recv(found, 1, group=group, tag=4) == 1
        assert found.tolist() == [3, 4]
        dist.send(torch.full((300_001,), 7.0), 1, group=group, tag=4)
    else:
        dist.barrier(group)
        if rank == 1:
            dist.send(torch.tensor([3.0, 4.0]), 0, group=group, tag=4)
            dist.recv(big, 0, group=group, tag=4)
            assert big.eq(7).all()
    dist.all_reduce(found, group=group)


def test_a_message_that_timed_out_is_withdrawn_and_the_group_goes_on(world, tmp_path):
    world.run(late, tmp_path)


@in_a_group
def overdue(rank, size):
    group = dist.new_group(timeout=SOON)
    found = torch.zeros(2)
    if rank == 0:
        with pytest.raises(RuntimeError, match="timed out"):
            dist.recv(found, 1, group=group)
    dist.barrier()
    group.set_timeout(timedelta(seconds=30))
    if rank == 0:
        dist.recv(found, 1, group=group)
    elif rank == 1:
        dist.send(torch.ones(2), 0, group=group)
    dist.all_reduce(found, group=group)


def test_after_the_group_s_timeout_of_a_receive_the_group_goes_on(world, tmp_path):
    world.run(overdue, tmp_path)


@in_a_group
def sizes_differ(rank, size):
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"12 bytes, the receiver.s 8"):
            dist.recv(torch.zeros(2), 1)
    elif rank == 1:
        dist.isend(torch.zeros(3), 0)
    dist.barrier()


def test_a_message_of_another_size_is_refused(world, tmp_path):
    world.run(sizes_differ, tmp_path)
