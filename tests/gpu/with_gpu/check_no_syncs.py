"""No step of DistributedOptimizer makes the host wait for the GPU.

torch raises an error at whatever would (its sync debug mode). What asks for a value is exempt:
GradScaler, weights in float16, HVDLITE_CHECK_NUMERICS; and so is `shard=True`, whose gradients pass
through host memory.
"""

import contextlib

import torch
from torch import nn

import hvdlite as hvd
from tests.gpu.with_gpu.checking import DEVICE, ON_GPU, check, run_checks, start
from tests.gpu.with_gpu.training import batch, loss_of, net, wrap

WARM_UP = 3


@contextlib.contextmanager
def no_synchronization():
    """Of any thread of this process."""
    if not ON_GPU:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_do_not_synchronize(step):
    for _ in range(WARM_UP):
        step()
    with no_synchronization():
        for _ in range(2):
            step()


def stepper(model, *optimizers, forward=None, weight=None):
    own = batch(hvd.rank())

    def step():
        for optimizer in optimizers:
            optimizer.zero_grad()
            if weight is not None:
                optimizer.set_weight(weight)
        loss_of(forward or model, own).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


@check
def a_plain_step():
    model = net()
    steps_do_not_synchronize(stepper(model, wrap(model)))


@check
def a_step_with_weights():
    model = net()
    steps_do_not_synchronize(stepper(model, wrap(model), weight=5.0 + hvd.rank()))


@check
def a_step_with_equal_weights():
    model = net()
    steps_do_not_synchronize(stepper(model, wrap(model), weight=1.0))


@check
def a_step_with_bfloat16_on_the_wire():
    model = net()
    steps_do_not_synchronize(stepper(model, wrap(model, compression=hvd.Compression.bf16)))


@check
def a_step_in_which_one_rank_does_not_use_a_parameter():
    model = nn.ModuleList([net(), nn.Linear(32, 8, dtype=torch.float64, device=DEVICE)])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def forward(x):
        return model[0](x) + (model[1](x) if hvd.rank() == 0 else 0.0)

    steps_do_not_synchronize(stepper(model, wrap(model), forward=forward))


@check
def a_step_of_two_optimizers():
    first, second = net(), net()
    other = torch.optim.Adam(second.parameters(), foreach=True)
    named = [(f"second.{name}", p) for name, p in second.named_parameters()]
    steps_do_not_synchronize(
        stepper(
            first,
            wrap(first),
            hvd.DistributedOptimizer(other, named),
            forward=lambda x: first(x) + second(x),
        )
    )


@check
def a_step_that_adds_up_two_passes():
    model = net()
    optimizer = wrap(model, backward_passes_per_step=2)
    own = batch(hvd.rank())

    def step():
        optimizer.zero_grad()
        loss_of(model, own).backward()
        loss_of(model, own).backward()
        optimizer.step()

    steps_do_not_synchronize(step)


start()
run_checks()
