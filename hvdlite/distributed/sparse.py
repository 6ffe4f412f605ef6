"""allreduce of sparse tensors (COO): every rank gathers all indices and values, and adds them."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.handles import Several
from hvdlite.collectives.sparse import combined
from hvdlite.distributed.arguments import movable, seconds
from hvdlite.distributed.work import OperationWork
from hvdlite.ops import DTYPES
from hvdlite.result_tensors import gathered_result
from hvdlite.sites import site

Tensor = torch.Tensor


def allreduce(group: Any, tensor: Tensor, opts: Any) -> Any:
    """The sum, in place. Ranks may have different indices.

    Raises:
        ValueError: Another op than SUM.
    """
    if opts.reduceOp != torch.distributed.ReduceOp.SUM:
        raise ValueError("allreduce: a sparse tensor can only be summed (ReduceOp.SUM)")
    own = tensor.detach().coalesce()
    flats = [movable("allreduce", part) for part in (own.indices().t(), own.values())]
    postings = [
        _core.posting(
            *(_core.ALLGATHER, group.next_name(), True, DTYPES[flat.dtype], flat), site=site(3)
        )
        for flat in flats
    ]
    operations = [group.team.post(posting, True) for posting in postings]

    def finish(_: Any) -> None:
        rows, values = (
            gathered_result(operation, flat.dtype)
            for operation, flat in zip(operations, flats, strict=True)
        )
        rows = rows.view(-1, own.sparse_dim())
        values = values.view(own.dtype).view(len(rows), *own.values().shape[1:])
        with torch.no_grad():
            tensor.copy_(combined(rows, values, own.shape, 1).coalesce())

    timeout_s = seconds(opts.timeout, group.timeout_s)
    work = OperationWork(group, Several(operations), [tensor], finish, timeout_s)
    if not opts.asyncOp:
        work.wait()
    else:
        work.end_alone()
    return work
