"""The collectives, one file for each with all its forms: blocking and asynchronous, in place,
grouped, differentiable.

They share `posting` (turns arguments into what the engine takes), `handles` (waiting) and `groups`.
A blocking form drives the engine itself and so leaves the progress thread asleep (`wake=False`).
"""

from hvdlite.collectives.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from hvdlite.collectives.allreduce import allreduce, allreduce_, allreduce_async, allreduce_async_
from hvdlite.collectives.alltoall import alltoall, alltoall_async
from hvdlite.collectives.barrier import barrier
from hvdlite.collectives.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from hvdlite.collectives.grouped_allreduce import (
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvdlite.collectives.handles import Handle, poll, rows_of, synchronize
from hvdlite.collectives.join import join
from hvdlite.collectives.objects import allgather_object, broadcast_object
from hvdlite.collectives.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdlite.collectives.sparse import sparse_allreduce_async

__all__ = [
    "Handle",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "rows_of",
    "sparse_allreduce_async",
    "synchronize",
]
