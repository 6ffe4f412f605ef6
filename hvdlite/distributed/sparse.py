"""allreduce of sparse tensors (COO): every rank gathers all indices and values, and adds them."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.collectives import sparse
from hvdlite.collectives.posting import Unnamed, checked
from hvdlite.distributed.arguments import seconds
from hvdlite.distributed.work import OperationWork
from hvdlite.ops import Sum

Tensor = torch.Tensor


def allreduce(group: Any, tensor: Tensor, opts: Any) -> Any:
    """The sum, in place. Ranks may have different indices.

    Raises:
        ValueError: Another op than SUM; a dtype that can't be added; a view of a complex tensor.
    """
    if opts.reduceOp != torch.distributed.ReduceOp.SUM:
        raise ValueError("allreduce: a sparse tensor can only be summed (ReduceOp.SUM)")
    # torch.distributed passes a complex tensor as a real one, whose new indices it would not get.
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    base = real._base if real._base is not None and real._base.is_complex() else None
    if base is not None and base._indices().data_ptr() != real._indices().data_ptr():
        raise ValueError("allreduce: a view of a sparse complex tensor; pass its clone()")
    own = real.detach().coalesce()
    checked("allreduce", own._values(), Sum)  # before it takes a number
    started = sparse.start("allreduce", Unnamed(group.next_name()), group.team, Sum, own)

    def finish(_: Any) -> None:
        total = started.result().coalesce()
        with torch.no_grad():
            real.copy_(total)
            if base is not None:
                base.copy_(torch.view_as_complex(total))

    timeout_s = seconds(opts.timeout, group.timeout_s)
    work = OperationWork(group, started.operation, [tensor], finish, timeout_s)
    if not opts.asyncOp:
        work.wait()
    else:
        work.end_alone()
    return work
