"""join: ranks whose data ends earlier than that of others."""

import pytest
import torch

import hvdlite as hvd


def batches_of(rank, size):
    """How many batches each rank has: all different, the longest in the middle."""
    return 2 + 3 * ((rank + size // 2) % size)


def uneven():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    counts = [batches_of(r, size) for r in range(size)]
    last = counts.index(max(counts))
    for epoch in range(2):
        for step in range(counts[rank]):
            there = [r for r in range(size) if counts[r] > step]
            for count in (3, 70_001):
                x = torch.full((count,), float(rank + 1 + step))
                values = [float(r + 1 + step) for r in there]
                total = sum(values)
                assert hvd.allreduce(x, op=hvd.Sum).eq(total).all()
                torch.testing.assert_close(hvd.allreduce(x), x * 0 + total / size)
                assert hvd.allreduce(-x, op=hvd.Max, name="max").eq(-min(values)).all()
                assert hvd.allreduce(x, op=hvd.Min, name="min").eq(min(values)).all()
                product = torch.tensor(values).prod()
                torch.testing.assert_close(hvd.allreduce(x, op=hvd.Product)[0], product)
                a, b = hvd.grouped_allreduce([x, x[:1] + 1], op=hvd.Sum, prescale_factor=2.0)
                assert a.eq(2 * total).all()
                assert b.item() == 2 * (total + len(there))
            hvd.barrier()
        assert hvd.join(device=epoch - 1) == last
        # The ranks have made different numbers of unnamed operations; that is forgotten.
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
        assert hvd.allreduce(torch.tensor(rank), op=hvd.Max) == size - 1
        assert hvd.broadcast(torch.tensor([rank]), size - 1).tolist() == [size - 1]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1", "2,2")
def test_a_rank_that_joined_takes_part_with_zeros_until_all_have(world):
    world.run(uneven)


def others_fail():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    texts = []
    if rank == 0:
        # Only now the first one has joined, as far as this one can tell.
        assert hvd.join() == size - 1
    else:
        hvd.allreduce(torch.ones(1), name="once")
        for call in (
            lambda: hvd.allgather(torch.ones(1), name="a"),
            lambda: hvd.broadcast(torch.ones(1), 1, name="b"),
            lambda: hvd.alltoall(torch.ones(size), name="c"),
            lambda: hvd.reducescatter(torch.ones(size), name="d"),
            lambda: hvd.grouped_allgather([torch.ones(1)] * 2, name="e"),
        ):
            with pytest.raises(hvd.HorovodInternalError) as caught:
                call()
            texts.append(str(caught.value))
        # One after the other, so that the last one is known.
        for other in range(1, rank):
            hvd.allreduce(torch.ones(1), name=f"before {other}", op=hvd.Sum)
        for other in range(rank, size - 1):
            hvd.allreduce(torch.ones(1), name=f"before {other}", op=hvd.Sum)
        assert hvd.join() == size - 1 or size == 2
    # Afterwards it all works, under the same names too.
    assert hvd.allgather(torch.tensor([rank]), name="a").tolist() == list(range(size))
    assert len(hvd.grouped_allgather([torch.ones(1)] * 2, name="e")) == 2
    return texts


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_while_a_rank_has_joined_all_but_allreduces_and_barriers_fail(world):
    texts = world.run(others_fail)[1]
    assert len(texts) == 5
    for text in texts:
        assert "rank 0" in text
        assert "join" in text


def in_sets():
    """Rank 0 has joined first; the others go on in sets with it, and without it."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    last = size - 1
    ends = hvd.add_process_set([0, last])
    others = hvd.add_process_set(range(1, size))
    alone = hvd.add_process_set([0])
    for epoch in range(2):
        # Different numbers of unnamed operations, in the sets too.
        if rank == 0:
            assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=alone).tolist() == [1] * 3
        else:
            for count in (3, 70_001):
                total = hvd.allreduce(torch.ones(count), op=hvd.Sum, process_set=others)
                assert total.eq(size - 1).all()
            assert hvd.allgather(torch.ones(1), process_set=others).tolist() == [1.0] * (size - 1)
        if rank == last:
            for count in (3, 70_001):
                x = torch.full((count,), 5.0)
                kind = {"process_set": ends}
                assert hvd.allreduce(x, op=hvd.Sum, **kind).eq(5).all()
                assert hvd.allreduce(x, **kind).eq(2.5).all()
                assert hvd.allreduce(-x, op=hvd.Max, **kind).eq(-5).all()
                a, b = hvd.grouped_allreduce([x, x[:1]], op=hvd.Sum, name="group", **kind)
                assert (a[0].item(), b.item()) == (5, 5)
            hvd.barrier(process_set=ends)
            for name in ("a", None):
                with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 on .* has joined"):
                    hvd.allgather(torch.ones(1), name=name, process_set=ends)
        if rank:
            # Also in the world, where all but rank 0 are still there.
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size - 1] * 2
        # In `ends` it is over when the last rank has joined, maybe before the others have.
        assert hvd.join() in range(1, size)
        for process_set in (hvd.global_process_set, ends, others, alone):
            if process_set.included():
                for name in ("a", None):
                    got = hvd.allgather(torch.tensor([rank]), name, process_set)
                    assert got.tolist() == process_set.ranks, epoch


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1", "1,1,1")
def test_a_rank_that_joined_takes_part_in_its_process_sets_too(world):
    world.run(in_sets)


def first_the_members_of_a_set():
    """All members of a set have joined, and it is over there, while another rank goes on."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    pair = hvd.add_process_set([0, 1])
    for epoch in range(3):
        if rank == size - 1:
            assert hvd.allreduce(torch.tensor(-1.0), op=hvd.Max, name="mine") == 0
            # Max leaves out ranks that have joined.
            assert hvd.allreduce(torch.tensor(-1.0), op=hvd.Max, name="mine") == -1
        else:
            hvd.allreduce(torch.tensor(0.0), op=hvd.Max, name="mine")
        assert hvd.join() == size - 1
        if pair.included():
            got = hvd.allreduce(torch.tensor(rank + 1.0), op=hvd.Sum, process_set=pair)
            assert got.item() == 3, epoch


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1", "1,1,1")
def test_a_set_whose_members_have_all_joined_works_again_after_the_join(world):
    world.run(first_the_members_of_a_set)


def another_leaves():
    hvd.init()
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 1])
    if rank == 2:
        hvd.shutdown()
        return
    if rank == 1:
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=pair).tolist() == [1, 1]
    with pytest.raises(hvd.HorovodInternalError, match="rank 2"):
        hvd.join()
    # Both have joined there, and neither has any more.
    assert hvd.allgather(torch.tensor([rank]), None, pair).tolist() == [0, 1]


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1", "1,1,1")
def test_where_a_rank_has_left_join_fails_and_the_sets_without_it_go_on(world):
    world.run(another_leaves)


def refuses():
    hvd.init()
    for device in (None, "cuda:0", 1.5, True):
        with pytest.raises(ValueError, match="expected the number of a GPU, or -1"):
            hvd.join(device)
    assert hvd.join(0) in range(hvd.size())


@pytest.mark.ranks(1, 2)
@pytest.mark.mpis("openmpi")
def test_join_takes_a_devices_number(world):
    world.run(refuses)


def who_joins_after_the_others(count):
    """One rank's allreduces end when the others have joined: it is the last one, whatever message
    overtakes another."""
    hvd.init()
    wrong = 0
    for i in range(count):
        last = i % hvd.size()
        if hvd.rank() == last:
            hvd.allreduce(torch.ones(1), name=f"alone {i % 16}")
        wrong += hvd.join() != last
    return wrong


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1", "2,1")
def test_who_could_know_of_anothers_join_has_joined_later(world):
    assert not any(world.run(who_joins_after_the_others, 500))
