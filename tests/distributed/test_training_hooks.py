"""The communication hooks of DistributedDataParallel.

Two do not run on CPUs, whatever the backend. torch 2.13's `batched_powerSGD_hook` passes a matrix
to a function that refuses all but three dimensions. Its quantization hooks read the future of an
all_gather in another form than Gloo's.
"""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.training import (
    LEARNING_RATE,
    distributed_optim,
    in_a_group,
    sgd,
    step,
)
from tests.optimizer.models import assert_same_parameters, batches, loss_of, model, own

STEPS = 6
FULL_RANK = 16  # no matrix of the model has more
HALF, BRAIN = torch.float16, torch.bfloat16


def builtin(kind):
    return lambda net: net._register_builtin_comm_hook(kind)


def python(hook):
    # DDP refuses bf16 hooks by their names where there is no NCCL.
    return lambda net: net.register_comm_hook(None, lambda state, bucket: hook(state, bucket))


# How a hook is registered, and the dtype in which it sends gradients.
HOOKS = {
    "built-in allreduce": (builtin(BuiltinCommHookType.ALLREDUCE), None),
    "built-in fp16": (builtin(BuiltinCommHookType.FP16_COMPRESS), HALF),
    "allreduce": (python(default_hooks.allreduce_hook), None),
    "fp16": (python(default_hooks.fp16_compress_hook), HALF),
    "bf16": (python(default_hooks.bf16_compress_hook), BRAIN),
    "fp16 around allreduce": (
        python(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        HALF,
    ),
    "bf16 around allreduce": (
        python(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        BRAIN,
    ),
}


def step_as_sent(alone, optimizer, x, y, size, sent):
    """One process, whose gradients take the way of those of `size` ranks: each rank's are divided
    and rounded to the dtype `sent`, and added up in it."""
    sums = None
    for rank in range(size):
        optimizer.zero_grad()
        loss_of(alone, own(x, rank, size), own(y, rank, size)).backward()
        parts = [p.grad.to(sent or p.dtype) / size for p in alone.parameters()]
        sums = parts if sums is None else [a + b for a, b in zip(sums, parts, strict=True)]
    for p, total in zip(alone.parameters(), sums, strict=True):
        p.grad = total.to(p.dtype)
    optimizer.step()


@in_a_group
def trains_with_hook(rank, size, hook, views):
    register, sent = HOOKS[hook]
    alone = model()
    net = DistributedDataParallel(model(), bucket_cap_mb=0.001, gradient_as_bucket_view=views)
    register(net)
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size):
        step_as_sent(alone, reference, x, y, size, sent)
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    # A sum of two numbers has one rounding in any order.
    assert_same_parameters(net.module, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_sends_the_gradients_in_its_dtype(world, tmp_path, hook, views):
    world.run(trains_with_hook, tmp_path, hook, views)


@in_a_group
def trains_with_power_sgd(rank, size, ranks):
    """An approximation by matrices of full rank is exact: it must train as one process does."""
    alone, net = model(), DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=ranks,
        start_powerSGD_iter=2,
        min_compression_rate=1e-9,  # also small matrices
        orthogonalization_epsilon=0,
    )
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 40, size):
        step(alone, reference, x, y)
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    assert state.iter == STEPS
    assert state.total_numel_after_compression < state.total_numel_before_compression or ranks > 1
    if ranks > 1:
        assert_same_parameters(net.module, alone, rtol=1e-6, atol=1e-9)
    x, y = next(batches(1, 40, size))
    return loss_of(net.module, x, y).item()


@pytest.mark.ranks(2)
def test_power_sgd_of_full_rank_is_exact_and_of_rank_1_the_same_on_all_ranks(world, tmp_path):
    for ranks in (FULL_RANK, 1):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        losses = world.run(trains_with_power_sgd, folder, ranks)
        assert losses[0] == losses[1]


@torch.no_grad()
def average(nets):
    for parameters in zip(*(net.parameters() for net in nets), strict=True):
        middle = torch.stack(list(parameters)).mean(0)
        for parameter in parameters:
            parameter.copy_(middle)


@in_a_group
def trains_with_local_sgd(rank, size):
    """Three steps together, then each rank by itself, and the mean of the parameters after every
    second step."""
    optim = distributed_optim()
    wholes = [model() for _ in range(size)]
    references = [torch.optim.SGD(n.parameters(), lr=LEARNING_RATE) for n in wholes]
    net = DistributedDataParallel(model())
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=3
    )
    net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = optim.PostLocalSGDOptimizer(
        torch.optim.SGD(net.parameters(), lr=LEARNING_RATE),
        averagers.PeriodicModelAverager(period=2, warmup_steps=3),
    )
    for number, (x, y) in enumerate(batches(9, 4, size)):
        for other, (alone, reference) in enumerate(zip(wholes, references, strict=True)):
            if number < 3:
                step(alone, reference, x, y)
            else:
                step(alone, reference, own(x, other, size), own(y, other, size))
        if number >= 3 and (number - 3) % 2 == 0:
            average(wholes)
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
        assert_same_parameters(net.module, wholes[rank])


@pytest.mark.ranks(2)
def test_post_local_sgd_averages_the_parameters_now_and_then(world, tmp_path):
    world.run(trains_with_local_sgd, tmp_path)


@in_a_group
def averages_in_levels(rank, size):
    """Each rank by itself; the mean of pairs after every second step, of all after every fourth."""
    nets = [model() for _ in range(size)]
    optimizers = [torch.optim.SGD(n.parameters(), lr=LEARNING_RATE) for n in nets]
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    averager = hierarchical_model_averager.HierarchicalModelAverager({2: 2, 4: size})
    for number, (x, y) in enumerate(batches(9, 4, size)):
        for other, (alone, reference) in enumerate(zip(nets, optimizers, strict=True)):
            step(alone, reference, own(x, other, size), own(y, other, size))
        together = size if number % 4 == 0 else 2 if number % 2 == 0 else 1
        for first in range(0, size, together):
            average(nets[first : first + together])
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
        averager.average_parameters(net.parameters())
        assert_same_parameters(net, nets[rank])


@pytest.mark.ranks(4)
def test_parameters_are_averaged_in_pairs_and_less_often_in_all_ranks(world, tmp_path):
    world.run(averages_in_levels, tmp_path)


@in_a_group
def overlaps_the_optimizer(rank, size):
    distributed_optim()
    alone, net = model(), DistributedDataParallel(model())
    reference = torch.optim.SGD(alone.parameters(), lr=LEARNING_RATE)
    net._register_fused_optim(torch.optim.SGD, lr=LEARNING_RATE)
    for x, y in batches(STEPS, 4, size):
        step(alone, reference, x, y)
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        net.zero_grad()
    assert_same_parameters(net.module, alone)


@pytest.mark.ranks(2)
def test_a_hook_makes_the_optimizers_step_when_a_bucket_is_reduced(world, tmp_path):
    world.run(overlaps_the_optimizer, tmp_path)
