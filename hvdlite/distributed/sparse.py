"""allreduce of sparse tensors (COO): every rank gathers all indices and values, and adds them."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.distributed import postings
from hvdlite.distributed.arguments import UNSET, movable
from hvdlite.distributed.work import OperationWork

Tensor = torch.Tensor


class _Pair:
    """Two operations as one."""

    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second

    def poll(self) -> bool:
        return bool(self.first.poll() and self.second.poll())

    def drive(self, limit_s: float) -> bool:
        return bool(self.first.drive(limit_s) and self.second.drive(limit_s))

    def wait(self, timeout_s: float = -1.0) -> str | None:
        failure: str | None = self.first.wait(timeout_s)
        if failure is None:
            failure = self.second.wait(timeout_s)
        return failure

    def label(self) -> tuple[str, str]:
        return self.first.label()  # type: ignore[no-any-return]


def allreduce(group: Any, tensor: Tensor, opts: Any) -> Any:
    """The sum, in place. Ranks may have different indices.

    Raises:
        ValueError: Another op than SUM.
    """
    if opts.reduceOp != torch.distributed.ReduceOp.SUM:
        raise ValueError("allreduce: a sparse tensor can only be summed (ReduceOp.SUM)")
    own = tensor.detach().coalesce()
    indices, values = own.indices().t().contiguous(), own.values().contiguous()
    flats = movable("allreduce", indices), movable("allreduce", values)
    operations = [
        postings.post(group.team, postings.allgather_any(group.next_name, flat)[0], True)
        for flat in flats
    ]

    def finish(pair: _Pair) -> None:
        parts = zip(
            postings.gathered(pair.first, flats[0].dtype),
            postings.gathered(pair.second, flats[1].dtype),
            strict=True,
        )
        total = torch.zeros_like(own)
        for part_indices, part_values in parts:
            if part_values.dtype != values.dtype:
                part_values = part_values.view(values.dtype)
            total = total + torch.sparse_coo_tensor(
                part_indices.view(-1, own.sparse_dim()).t(),
                part_values.view(-1, *values.shape[1:]),
                own.shape,
                check_invariants=False,
            )
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    timeout_s = group.timeout_s if opts.timeout == UNSET else opts.timeout.total_seconds()
    work = OperationWork(group, _Pair(*operations), [tensor], finish, timeout_s)
    if not opts.asyncOp:
        work.wait()
    else:
        work.end_alone()
    return work
