"""free_gradients=True: the memory of gradients goes back to the system at the end of each step."""

import mmap
import struct

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.buckets.pages import Pages
from tests.optimizer.sharding.models import batch, differences, odd

PAGE_BYTES = mmap.PAGESIZE
KNOBS = {"HVDLITE_BUCKET_BYTES": "16000"}


def resident_pages(tensor):
    """How many pages of its memory there are."""
    first = tensor.data_ptr() // PAGE_BYTES
    last = (tensor.data_ptr() + tensor.nbytes - 1) // PAGE_BYTES
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(8 * first)
        words = struct.unpack(f"{last - first + 1}Q", file.read(8 * (last - first + 1)))
    return sum(word >> 63 for word in words)


def buckets_of(optimizer):
    return optimizer._hvdlite_reducer.gradients.buckets


def resident(optimizer):
    buckets = buckets_of(optimizer)
    return sum(resident_pages(memory) for each in buckets for memory in (each.flat, each.wire))


def pair(shard, shared=False, kind=torch.optim.Adam, **options):
    """An optimizer that keeps its gradients, and one that frees them, each with its own model."""
    hvd.init()
    made = []
    for frees in (False, True):
        net = odd()
        if shared:
            hvd.share_parameters(net)
        optimizer = hvd.DistributedOptimizer(
            kind(net.parameters(), lr=0.01),
            net.named_parameters(),
            shard=shard,
            free_gradients=frees,
            **options,
        )
        made.append((net, optimizer))
    return made


def backward(net, optimizer, step):
    optimizer.zero_grad()
    net(batch(step)).square().mean().backward()


class Normed(torch.optim.SGD):
    """Looks at whole parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / (param.grad.norm() + 1))


def frees(shard, shared, kind, compression):
    (kept, keeping), (freed, freeing) = pair(shard, shared, kind, compression=compression)
    for step in range(4):
        for net, optimizer in ((kept, keeping), (freed, freeing)):
            backward(net, optimizer, step)
            assert resident(optimizer)
            optimizer.step()
        assert differences(freed, kept) == [], step
        assert resident(keeping)
        assert resident(freeing) == 0
        assert all(param.grad is None for param in freed.parameters())
    hvd.barrier()


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.above_mpi
@pytest.mark.parametrize(
    ("shard", "shared", "kind", "compression"),
    [
        (True, False, torch.optim.Adam, hvd.Compression.none),
        ("host", True, torch.optim.Adam, hvd.Compression.fp16),
        (True, False, Normed, hvd.Compression.none),
        (False, False, torch.optim.Adam, hvd.Compression.bf16),
        (False, True, torch.optim.Adam, hvd.Compression.none),
    ],
)
def test_after_a_step_gradients_have_no_memory_and_parameters_have_the_same_bits(
    world, shard, shared, kind, compression
):
    world.run(frees, shard, shared, kind, compression, knobs=KNOBS)


def keeps():
    (kept, keeping), (freed, freeing) = pair(False)
    held = []
    for step in range(4):
        for net, optimizer in ((kept, keeping), (freed, freeing)):
            backward(net, optimizer, step)
        held.append((freed.end.weight.grad, freed.end.weight.grad.clone()))
        keeping.step()
        freeing.step()
        assert freed.end.weight.grad is None
        assert differences(freed, kept) == [], step
    assert all(torch.equal(grad, values) for grad, values in held)
    assert len({grad.data_ptr() for grad, _ in held}) == len(held)


@pytest.mark.ranks(2)
def test_a_gradient_that_the_user_keeps_has_its_values_after_the_step(world):
    world.run(keeps)


def changes():
    (kept, keeping), (freed, freeing) = pair(True)
    for step in range(8):
        for net, optimizer in ((kept, keeping), (freed, freeing)):
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


@pytest.mark.ranks(2)
def test_frozen_thawed_and_added_parameters_train_on(world):
    world.run(changes)


def is_interrupted(shard):
    (kept, keeping), (freed, freeing) = pair(shard)
    for step in range(5):
        for net, optimizer in ((kept, keeping), (freed, freeing)):
            backward(net, optimizer, step)
        keeping.step()
        gradients = freeing._hvdlite_reducer.gradients
        if step == 3 and hvd.rank() == 1:
            gradients.free = interrupt  # as a signal's handler would
            with pytest.raises(KeyboardInterrupt):
                freeing.step()
            del gradients.free
        else:
            freeing.step()
            assert resident(freeing) == 0
        assert differences(freed, kept) == [], step


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [False, True])
def test_an_interrupted_step_changes_no_bits(world, shard):
    world.run(is_interrupted, shard, knobs=KNOBS)


def test_memory_that_was_given_back_is_zero():
    pages = Pages()
    tensors = [
        pages.zeros(elems, dtype=dtype, device="cpu")
        for elems, dtype in ((0, torch.float32), (1, torch.bfloat16), (5000, torch.complex64))
    ]
    for tensor in tensors:
        assert tensor.device == torch.device("cpu")
        assert not tensor.any()
        tensor.fill_(7)
    pages.give_back()
    assert not any(tensor.any() for tensor in tensors)


def refuses():
    hvd.init()
    net = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="free_gradients='yes': expected True or False"):
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), free_gradients="yes")
    with pytest.raises(ValueError, match="does not go with op=Adasum"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters()), op=hvd.Adasum, free_gradients=True
        )


@pytest.mark.ranks(1)
def test_arguments_that_do_not_go_together_are_refused(world):
    world.run(refuses)
