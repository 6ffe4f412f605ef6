"""Every form of the collectives, called in one way: with tensors on the host, or on GPUs."""

import torch

import hvdlite as hvd


def ranks_values(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return (torch.arange(count) * hvd.size() + hvd.rank()).to(dtype).reshape(shape)


def pair():
    return [ranks_values(3, 2), ranks_values(5)]


# Each is called with a function that makes a tensor (plain, or as if on a GPU) and a name.
CALLS = {
    "allreduce": lambda to, name: hvd.allreduce(to(ranks_values(4, 3)), name=name),
    "allreduce, unnamed": lambda to, name: hvd.allreduce(to(ranks_values(4, 3)), op=hvd.Sum),
    "allreduce of a view": lambda to, name: hvd.allreduce(
        to(ranks_values(4, 3)).t(), name=name, op=hvd.Max
    ),
    "allreduce of a scalar": lambda to, name: hvd.allreduce(to(ranks_values()), name=name),
    "allreduce of nothing": lambda to, name: hvd.allreduce(to(ranks_values(0, 3)), name=name),
    "allreduce, scaled": lambda to, name: hvd.allreduce(
        to(ranks_values(6, dtype=torch.int32)), name=name, prescale_factor=2.0, postscale_factor=0.5
    ),
    "allreduce, compressed": lambda to, name: hvd.allreduce(
        to(ranks_values(6)), name=name, compression=hvd.Compression.fp16
    ),
    "allreduce, Adasum": lambda to, name: hvd.allreduce(
        to(ranks_values(6)), name=name, op=hvd.Adasum
    ),
    "allreduce_": lambda to, name: hvd.allreduce_(to(ranks_values(4)), name=name),
    "allreduce_async": lambda to, name: hvd.synchronize(
        hvd.allreduce_async(to(ranks_values(4)), name=name, op=hvd.Min)
    ),
    "allreduce_async_": lambda to, name: hvd.synchronize(
        hvd.allreduce_async_(to(ranks_values(4)), name=name)
    ),
    "grouped_allreduce": lambda to, name: hvd.grouped_allreduce(
        [to(t) for t in pair()], name=name, op=hvd.Sum
    ),
    "grouped_allreduce, large": lambda to, name: hvd.grouped_allreduce(
        [to(ranks_values(40_000)), *(to(t) for t in pair()), to(ranks_values(2).int())], name=name
    ),
    "grouped_allreduce_": lambda to, name: hvd.grouped_allreduce_(
        [to(t) for t in pair()], name=name
    ),
    "grouped_allreduce_async": lambda to, name: hvd.synchronize(
        hvd.grouped_allreduce_async([to(t) for t in pair()], name=name)
    ),
    "broadcast": lambda to, name: hvd.broadcast(to(ranks_values(4, 3)), hvd.size() - 1, name=name),
    "broadcast_": lambda to, name: hvd.broadcast_(
        to(ranks_values(4).bool()), hvd.size() - 1, name=name
    ),
    "broadcast_async": lambda to, name: hvd.synchronize(
        hvd.broadcast_async(to(ranks_values(4)), 0, name=name)
    ),
    "allgather": lambda to, name: hvd.allgather(to(ranks_values(hvd.rank() + 1, 2)), name=name),
    "allgather_async": lambda to, name: hvd.synchronize(
        hvd.allgather_async(to(ranks_values(2, 2).bool()), name=name)
    ),
    "grouped_allgather": lambda to, name: hvd.grouped_allgather(
        [to(ranks_values(hvd.rank(), 2)), to(ranks_values(3))], name=name
    ),
    "alltoall": lambda to, name: hvd.alltoall(to(ranks_values(hvd.size() * 2, 2)), name=name),
    "alltoall with splits": lambda to, name: hvd.alltoall(
        to(ranks_values(hvd.size() * 2, 2)), [1] * (hvd.size() - 1) + [2], name=name
    ),
    "alltoall_async": lambda to, name: hvd.synchronize(
        hvd.alltoall_async(to(ranks_values(hvd.size())), name=name)
    ),
    "reducescatter": lambda to, name: hvd.reducescatter(to(ranks_values(7, 2)), name=name),
    "reducescatter_async": lambda to, name: hvd.synchronize(
        hvd.reducescatter_async(to(ranks_values(2, 2)), name=name, op=hvd.Sum)
    ),
    "grouped_reducescatter": lambda to, name: hvd.grouped_reducescatter(
        [to(ranks_values(7, 2)), to(ranks_values(5).long())], name=name, op=hvd.Sum
    ),
}
