"""hvdlite: data-parallel training for PyTorch, with Horovod's API.

Importing it starts nothing: no MPI, no thread. `init` does.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from hvdlite.asynchronous.optimizer import AsyncOptimizer
from hvdlite.asynchronous.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from hvdlite.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
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
from hvdlite.collectives.handles import poll, synchronize
from hvdlite.collectives.join import join
from hvdlite.collectives.objects import allgather_object, broadcast_object
from hvdlite.collectives.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdlite.collectives.sparse import sparse_allreduce_async
from hvdlite.compression import Compression
from hvdlite.errors import HorovodInternalError, HvdliteError, RankError
from hvdlite.observe.metrics import metrics
from hvdlite.observe.reporting import report_progress
from hvdlite.ops import Adasum, Average, Max, Min, Product, Sum
from hvdlite.optimizer.distributed import DistributedOptimizer
from hvdlite.parameter_check import check_parameters
from hvdlite.preemption import preempted
from hvdlite.registry import add_process_set, init, remove_process_set
from hvdlite.run_function import run
from hvdlite.shared import is_shared, share_parameters, shared_tensor
from hvdlite.state import broadcast_optimizer_state, broadcast_parameters
from hvdlite.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from hvdlite.timeline import start_timeline, stop_timeline
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set
from hvdlite.world.virtual_ranks import virtual_micro_batches, virtual_ranks, virtual_size
from hvdlite.world.world import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

if not _TYPE_CHECKING:  # a type checker would take every name for one of ours
    from hvdlite.absent import __getattr__ as __getattr__

__version__ = _version("hvdlite")

__all__ = [
    "Adasum",
    "AsyncOptimizer",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "FixedShardsPartitioner",
    "HorovodInternalError",
    "HvdliteError",
    "Max",
    "MaxSizePartitioner",
    "Min",
    "MinSizePartitioner",
    "ProcessSet",
    "Product",
    "RankError",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
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
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_parameters",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_shared",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "preempted",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "report_progress",
    "rocm_built",
    "run",
    "share_parameters",
    "shared_tensor",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "virtual_micro_batches",
    "virtual_ranks",
    "virtual_size",
]
