"""The differentiable forms. The gradients are Horovod's, so that scripts keep their numbers.

The backward of operation X is an operation named `X.grad`.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import world
from hvdlite.collectives import (
    Unnamed,
    allgather_async,
    allreduce_async,
    broadcast_async,
    rows_of,
    synchronize,
)
from hvdlite.ops import Average, ReduceOp


def label(name: str | None) -> str:
    """The operation's name, also where the user gave none, since its backward has it too."""
    return Unnamed(world.current().unnamed(0)) if name is None else name


class Allreduce(torch.autograd.Function):
    """Forward and backward are the same allreduce, with the same op and factors."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str, op: ReduceOp, prescale: float, postscale: float
    ) -> torch.Tensor | None:
        ctx.arguments = (None, f"{name}.grad", op, prescale, postscale)
        return synchronize(allreduce_async(tensor, None, name, op, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return synchronize(allreduce_async(grad, *ctx.arguments)), None, None, None, None


class Allgather(torch.autograd.Function):
    """Backward: the gradient averaged over the ranks, then the rows that this rank contributed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor | None:
        handle = allgather_async(tensor, name)
        gathered = synchronize(handle)
        ctx.name = f"{name}.grad"
        ctx.rows = rows_of(handle)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        averaged = synchronize(allreduce_async(grad, None, ctx.name, Average))
        assert averaged is not None
        rank = world.rank()
        begin = sum(ctx.rows[:rank])
        return averaged[begin : begin + ctx.rows[rank]], None


class Broadcast(torch.autograd.Function):
    """Backward: averaged on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str) -> torch.Tensor | None:
        ctx.name = f"{name}.grad"
        ctx.root_rank = root_rank
        return synchronize(broadcast_async(tensor, root_rank, name))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        averaged = synchronize(allreduce_async(grad, None, ctx.name, Average))
        assert averaged is not None
        if world.rank() != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None
