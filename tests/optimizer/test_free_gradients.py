"""free_gradients=True: the memory of gradients goes back to the system at the end of each step."""

import functools
import mmap
import struct

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.buckets.pages import Pages
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.models import batch, differences, odd
from tests.optimizer.sharding.test_own_optimizers import Scaled

pytestmark = pytest.mark.ranks(2)

PAGE_BYTES = mmap.PAGESIZE
KNOBS = {"HVDLITE_BUCKET_BYTES": "16000"}
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def resident_pages(tensor):
    """How many pages of its memory there are."""
    first = tensor.data_ptr() // PAGE_BYTES
    last = (tensor.data_ptr() + tensor.nbytes - 1) // PAGE_BYTES
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(8 * first)
        words = struct.unpack(f"{last - first + 1}Q", file.read(8 * (last - first + 1)))
    return sum(word >> 63 for word in words)


def resident(optimizer):
    buckets = optimizer._hvdlite_reducer.gradients.buckets
    return sum(resident_pages(memory) for each in buckets for memory in (each.flat, each.wire))


def pair(kind=ADAM, shared=False, **options):
    """An optimizer that keeps its gradients, and one that frees them, each with its own model."""
    made = []
    for frees in (False, True):
        net = odd()
        if shared:
            hvd.share_parameters(net)
        optimizer = kind(net.parameters())
        options["free_gradients"] = frees
        made.append((net, hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)))
    return made


def backward(net, optimizer, step):
    optimizer.zero_grad()
    net(batch(step)).square().mean().backward()


@pytest.mark.above_mpi
@pytest.mark.parametrize(
    ("shared", "kind", "options"),
    [
        (False, ADAM, {"shard": True}),
        (True, ADAM, {"shard": "host", "compression": hvd.Compression.fp16}),
        (False, functools.partial(Scaled, lr=0.01), {"shard": True}),
        (False, ADAM, {"compression": hvd.Compression.bf16}),
        (True, ADAM, {}),
    ],
)
@on_ranks(2, hosts=("2,1",), knobs=KNOBS)
def test_after_a_step_gradients_have_no_memory_and_parameters_have_the_same_bits(
    shared, kind, options
):
    (kept, keeping), (freed, freeing) = both = pair(kind, shared, **options)
    for step in range(4):
        for net, optimizer in both:
            backward(net, optimizer, step)
            assert resident(optimizer)
            optimizer.step()
        assert differences(freed, kept) == [], step
        assert resident(keeping)
        assert resident(freeing) == 0
        assert all(param.grad is None for param in freed.parameters())
    hvd.barrier()


@on_ranks()
def test_a_gradient_that_the_user_keeps_has_its_values_after_the_step():
    (kept, _), (freed, _) = both = pair()
    held = []
    for step in range(4):
        for net, optimizer in both:
            backward(net, optimizer, step)
        held.append((freed.end.weight.grad, freed.end.weight.grad.clone()))
        for _, optimizer in both:
            optimizer.step()
        assert freed.end.weight.grad is None
        assert differences(freed, kept) == [], step
    assert all(torch.equal(grad, values) for grad, values in held)
    assert len({grad.data_ptr() for grad, _ in held}) == len(held)


@on_ranks()
def test_frozen_thawed_and_added_parameters_train_on():
    (kept, _), (freed, freeing) = both = pair(shard=True)
    for step in range(8):
        for net, optimizer in both:
            if step in (2, 4):
                net.mix.requires_grad_(step == 4)
            if step == 6:
                torch.manual_seed(3)
                net.end = nn.Linear(37, 5)
                optimizer.add_param_group({"params": list(net.end.parameters()), "lr": 0.02})
            with optimizer.no_sync():
                backward(net, optimizer, step)
            net(batch(step + 100)).square().mean().backward()
            optimizer.step()
        assert differences(freed, kept) == [], step
        assert resident(freeing) == 0


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("shard", [False, True])
@on_ranks(knobs=KNOBS)
def test_an_interrupted_step_changes_no_bits(shard):
    (kept, keeping), (freed, freeing) = both = pair(shard=shard)
    gradients = freeing._hvdlite_reducer.gradients
    for step in range(5):
        for net, optimizer in both:
            backward(net, optimizer, step)
        keeping.step()
        if step == 3 and hvd.rank() == 1:
            gradients.free = interrupt  # as a signal's handler would
            with pytest.raises(KeyboardInterrupt):
                freeing.step()
            del gradients.free
        else:
            freeing.step()
            assert resident(freeing) == 0
        assert differences(freed, kept) == [], step


def test_memory_that_was_given_back_is_zero():
    pages = Pages()
    kinds = ((0, torch.float32), (1, torch.bfloat16), (5000, torch.complex64))
    tensors = [pages.zeros(elems, dtype=dtype, device="cpu") for elems, dtype in kinds]
    for tensor in tensors:
        assert not tensor.any()
        tensor.fill_(7)
    pages.give_back()
    assert not any(tensor.any() for tensor in tensors)
