"""Samplers: the order of torch's, and an epoch that goes on after a break with any number of
ranks."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import DistributedSampler as TorchSampler

from hvdlite.recipes import DistributedSampler


def samplers(length, ranks, **options):
    data = range(length)
    return [DistributedSampler(data, ranks, rank, **options) for rank in range(ranks)]


def train(ranks, batch_size, batches):
    """The samples of so many batches of each rank, in the order of the steps; the loaders fetch all
    that is left at once."""
    loaders = [list(sampler) for sampler in ranks]
    seen = []
    for sampler in ranks:
        sampler.advance(0)
    for number in range(batches):
        for sampler, samples in zip(ranks, loaders, strict=True):
            batch = samples[number * batch_size : (number + 1) * batch_size]
            sampler.advance(len(batch))
            seen += batch
    return seen


@given(
    length=st.integers(0, 40),
    ranks=st.integers(1, 9),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_a_whole_epoch_is_that_of_torch(length, ranks, epoch, seed, shuffle, drop_last):
    if length == 0 and not drop_last:
        return  # torch divides by zero
    options = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    for rank, ours in enumerate(samplers(length, ranks, **options)):
        theirs = TorchSampler(range(length), ranks, rank, **options)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


SEGMENTS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=6
)


@given(length=st.integers(1, 60), segments=SEGMENTS, epoch=st.integers(0, 2))
def test_any_segments_of_ranks_batch_sizes_and_steps_cover_an_epoch_exactly_once(
    length, segments, epoch
):
    state = None
    seen = []
    whole = DistributedSampler(range(length), 1, 0)
    whole.set_epoch(epoch)
    for ranks, batch_size, batches in [*segments, (3, length, 1)]:
        now = samplers(length, ranks, even=False)
        for sampler in now:
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
        seen += train(now, batch_size, batches)
        state = now[0].state_dict()
    assert Counter(seen) == Counter(range(length))
    assert state["cursor"] == length
    assert state["epoch"] == epoch


@given(length=st.integers(1, 60), segments=SEGMENTS)
def test_what_is_consumed_is_the_beginning_of_one_global_order_whatever_the_ranks(length, segments):
    order = list(DistributedSampler(range(length), 1, 0))
    state = None
    seen = []
    for ranks, batch_size, batches in segments:
        now = samplers(length, ranks)
        if state is not None:
            for sampler in now:
                sampler.load_state_dict(state)
        seen += train(now, batch_size, batches)
        cursor = now[0].cursor
        assert set(seen) == set(order[:cursor])
        if cursor == length:
            assert len(seen) < length + ranks  # the padding
            return
        assert len(seen) == cursor
        state = now[0].state_dict()


@pytest.mark.parametrize(("length", "ranks"), [(10, 4), (7, 3), (2, 5)])
def test_an_even_end_is_padded_by_the_beginning_of_the_epoch(length, ranks):
    order = list(DistributedSampler(range(length), 1, 0))
    now = samplers(length, ranks)
    dealt = [sample for step in zip(*now, strict=True) for sample in step]
    padding = -length % ranks
    assert dealt == order + (order * ranks)[:padding]


def test_without_padding_each_sample_comes_once_and_the_first_ranks_have_one_more():
    shares = [list(sampler) for sampler in samplers(10, 4, even=False)]
    assert [len(share) for share in shares] == [3, 3, 2, 2]
    assert [len(sampler) for sampler in samplers(10, 4, even=False)] == [3, 3, 2, 2]
    assert sorted(sample for share in shares for sample in share) == list(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_loader_has_fetched_ahead_is_not_consumed(workers):
    data = TensorDataset(torch.arange(64))
    sampler = DistributedSampler(data, 2, 0)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
    seen = []
    for (batch,) in loader:
        sampler.advance(len(batch))
        seen += batch.tolist()
        if len(seen) == 12:
            break
    state = sampler.state_dict()
    assert state["cursor"] == 24
    resumed = DistributedSampler(data, 2, 0)
    resumed.load_state_dict(state)
    assert seen + list(resumed) == list(DistributedSampler(data, 2, 0))


def test_a_look_at_the_first_batch_after_a_restore_loses_nothing():
    sampler = DistributedSampler(range(20), 2, 1)
    sampler.load_state_dict({**sampler.state_dict(), "cursor": 8})
    assert next(iter(sampler)) == next(iter(sampler))
    assert list(sampler) == list(DistributedSampler(range(20), 2, 1))[4:]


def test_an_epoch_that_was_left_goes_on_although_all_of_it_was_fetched():
    sampler = DistributedSampler(range(20), 2, 0)
    sampler.set_epoch(1)
    seen = train([sampler], 2, 3)
    sampler.set_epoch(1)
    rest = list(sampler)
    assert seen + rest == whole_epoch(1)
    sampler.advance(len(rest))
    assert list(sampler) == whole_epoch(1)


def test_a_look_that_fetches_all_after_a_restore_loses_nothing():
    saved = DistributedSampler(range(20), 2, 0)
    saved.set_epoch(1)
    seen = train([saved], 2, 3)
    sampler = DistributedSampler(range(20), 2, 0)
    sampler.load_state_dict(saved.state_dict())
    sampler.set_epoch(1)
    list(sampler)
    assert seen + list(sampler) == whole_epoch(1)


def whole_epoch(epoch):
    sampler = DistributedSampler(range(20), 2, 0)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_without_set_epoch_samples_that_a_loader_drops_do_not_come_for_ever():
    sampler = DistributedSampler(range(20), 2, 0)
    for _ in range(2):
        assert len(list(sampler)) == 10
        sampler.advance(8)


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (lambda sampler: None, 1),
        (lambda sampler: sampler.set_epoch(0), 1),
        (lambda sampler: sampler.set_epoch(1), 0),
        (lambda sampler: sampler.load_state_dict(sampler.state_dict()), 0),
    ],
    ids=["at once", "the same epoch", "another epoch", "another state"],
)
def test_what_is_to_be_done_when_an_epoch_goes_on_is_done_once_and_in_no_other(change, runs):
    sampler = DistributedSampler(range(20), 2, 0)
    done = []
    sampler.before_next_pass(lambda: done.append(True))
    change(sampler)
    for _ in range(2):
        next(iter(sampler))
    assert len(done) == runs


def test_an_epoch_that_is_chosen_again_goes_on_and_another_one_begins():
    sampler = DistributedSampler(range(20), 2, 0)
    sampler.set_epoch(3)
    train([sampler], 2, 3)
    sampler.set_epoch(3)
    assert sampler.cursor == 12
    sampler.set_epoch(4)
    assert sampler.cursor == 0
    assert len(list(sampler)) == 10


def test_an_epoch_saved_at_its_end_has_no_samples_left_and_the_next_one_has_all():
    sampler = DistributedSampler(range(20), 2, 0)
    sampler.set_epoch(3)
    train([sampler], 5, 2)
    resumed = DistributedSampler(range(20), 2, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.epoch == 3
    resumed.set_epoch(3)
    assert list(resumed) == []
    resumed.set_epoch(4)
    assert len(list(resumed)) == 10


def test_a_script_that_counts_no_epochs_gets_all_samples_each_time_and_after_a_restore():
    sampler = DistributedSampler(range(20), 2, 0)
    for _ in range(2):
        assert len(train([sampler], 5, 2)) == 10
    resumed = DistributedSampler(range(20), 2, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == list(DistributedSampler(range(20), 2, 0))


def test_a_sampler_that_was_never_told_what_is_consumed_refuses_to_be_saved():
    sampler = DistributedSampler(range(20), 2, 0)
    assert sampler.state_dict()["cursor"] == 0
    assert len(list(sampler)) == 10
    with pytest.raises(ValueError, match=r"has got 10 samples of epoch 0 on rank 0.*advance\(len"):
        sampler.state_dict()
    sampler.advance(0)
    assert sampler.state_dict()["cursor"] == 0


@pytest.mark.parametrize("samples", [-1, 3])
def test_more_than_the_loader_has_got_can_not_be_consumed(samples):
    sampler = DistributedSampler(range(20), 2, 1)
    iterator = iter(sampler)
    next(iterator), next(iterator)
    with pytest.raises(
        ValueError, match=rf"advance\({samples}\) on rank 1: of epoch 0 .* got 2 samples"
    ):
        sampler.advance(samples)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"length": 21}, "length was 21 when this was saved, and is 20 now"),
        ({"seed": 5}, "seed was 5 when this was saved, and is 0 now"),
        ({"shuffle": False}, "shuffle was False"),
    ],
)
def test_a_state_of_another_order_is_refused(change, text):
    sampler = DistributedSampler(range(20), 2, 0)
    with pytest.raises(ValueError, match=text):
        sampler.load_state_dict({**sampler.state_dict(), **change})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_replicas": 2, "rank": 2}, "rank 2 is not one of 2 ranks"),
        ({"num_replicas": 2, "rank": 0, "drop_last": True, "even": False}, "choose one"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        DistributedSampler(range(20), **options)
