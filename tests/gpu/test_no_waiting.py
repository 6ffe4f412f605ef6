"""A step never makes the host wait for the GPU: nothing is read from it, or copied from memory that
is not pinned.
"""

import contextlib

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.gpu_bucket import GpuBucket
from tests.gpu.stand_in import OnGpu, new_queue, on_gpu

pytestmark = [pytest.mark.ranks(2), pytest.mark.hosts()]

Tensor = torch.Tensor
# These return what is on the GPU, and so wait for it.
READS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
}


@contextlib.contextmanager
def watched(params):
    """Yields what the host has waited for inside, and the names of the functions called."""
    waits, calls = [], []

    def on_device(tensor):
        # Autograd's gradients don't say of themselves where they are.
        grads = {param.grad.data_ptr() for param in params if param.grad is not None}
        return isinstance(tensor, OnGpu) or tensor.data_ptr() in grads or tensor.dim() == 0

    def watch(func, args, kwargs):
        OnGpu.watch = None
        try:
            name = getattr(func, "__name__", str(func))
            flat = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            tensors = [each for each in flat if isinstance(each, Tensor)]
            if func in READS:
                waits.append(name)
            elif name == "copy_" and not all(map(on_device, tensors)):
                waits.append("copy_ from or to memory that is not pinned")
            elif name in ("__getitem__", "__setitem__") and not all(
                isinstance(index, int | slice) for index in flat[1:2]
            ):
                waits.append(f"an index of {type(flat[1]).__name__}")
            if name not in ("__get__", "__set__"):
                calls.append(name)
        finally:
            OnGpu.watch = watch

    OnGpu.watch = watch
    try:
        yield waits, calls
    finally:
        OnGpu.watch = None


def on_gpu_too(self, elems, dtype, device):
    """The buckets' memory is on the GPU, too."""
    return on_gpu(Bucket.zeros(self, elems, dtype, device))


def steps(layers, option):
    queue = new_queue()
    GpuBucket.zeros = on_gpu_too
    params = [torch.nn.Parameter(on_gpu(torch.ones(5))) for _ in range(layers)]
    options = {"compression": hvd.Compression.bf16} if option == "bf16" else {}
    if option == "predivided":
        options["gradient_predivide_factor"] = 2.0
    named = [(f"p{index}", param) for index, param in enumerate(params)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), named, **options)
    waits, calls = [], []
    for step in range(5):
        queue.settle()
        used = params[1:] if option == "unused on a rank" and hvd.rank() == 1 else params
        if option == "weights":
            optimizer.set_weight(3.0 + hvd.rank())
        loss = sum((param * (index + 1.0)).sum() for index, param in enumerate(used))
        with watched(params) if step > 2 else contextlib.nullcontext(([], [])) as (w, c):
            # (Inside a function of a subclass of Tensor torch asks no subclass.)
            loss.as_subclass(Tensor).backward()
            optimizer.step()
            optimizer.zero_grad()
        waits, calls = waits + w, c
    return waits, calls


OPTIONS = ["plain", "predivided", "bf16", "weights", "unused on a rank"]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_step_never_waits_for_the_gpu(world, option):
    knobs = {"HVDLITE_FIRST_BUCKET_BYTES": "20", "HVDLITE_BUCKET_BYTES": "60"}
    for waits, calls in world.run(steps, 8, option, knobs=knobs):
        assert waits == []
        assert calls  # the watch has seen something
