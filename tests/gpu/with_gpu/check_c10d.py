"""DDP, FSDP2 and tensor parallel through the backend hvdlite give what PyTorch's own gives."""

import contextlib
import json
import os
import socket

import torch
import torch.distributed as dist
from torch import nn

import hvdlite as hvd
from tests.gpu.with_gpu.checking import DEVICE, ON_GPU, check, needs, run_checks, start

THEIRS = "nccl" if ON_GPU else "gloo"
WIDTH = 256
STEPS = 5


def network():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(DEVICE)


def mesh():
    return dist.device_mesh.init_device_mesh(DEVICE, (dist.get_world_size(),))


def ddp(model):
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def tensor_parallel(model):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(model, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


@contextlib.contextmanager
def process_group(backend):
    """The default group, on a store of its own."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = hvd.broadcast_object(probe.getsockname()[1], root_rank=0)
    store = dist.TCPStore("127.0.0.1", port, hvd.size(), hvd.rank() == 0)
    dist.init_process_group(backend, store=store, rank=hvd.rank(), world_size=hvd.size())
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(backend, how, same_data):
    """The parameters' sums after some steps, and what all_gather_object gave."""
    with process_group(backend):
        net = how(network())
        # A DTensor and a tensor are not updated by one call.
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, foreach=False)
        generator = torch.Generator().manual_seed(0 if same_data else hvd.rank())
        for _ in range(STEPS):
            x = torch.randn(16, WIDTH, generator=generator).to(DEVICE)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
        sums = [value.detach().double().sum().item() for value in whole]
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, hvd.rank())
        assert gathered == list(range(hvd.size())), gathered
        return sums


def assert_same_sums(how, same_data=False):
    nccl = os.environ.get("HVDLITE_GPU_COLLECTIVES") != "staged"
    needs(nccl or not ON_GPU, "NCCL, as torch.distributed stages nothing")
    ours, theirs = (trained(backend, how, same_data) for backend in ("hvdlite", THEIRS))
    everyones = hvd.allgather_object(json.dumps(ours))
    assert len(set(everyones)) == 1, everyones
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-5), (
        ours,
        theirs,
    )


@check
def ddp_gives_the_same_sums():
    assert_same_sums(ddp)


@check
def fsdp2_gives_the_same_sums():
    assert_same_sums(fsdp)


@check
def tensor_parallel_gives_the_same_sums():
    assert_same_sums(tensor_parallel, same_data=True)


start()
run_checks()
