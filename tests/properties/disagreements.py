"""What a rank can call that does not agree with what the others call, and is no bad argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from tests.properties.calls import (
    Allgather,
    Allreduce,
    Alltoall,
    Barrier,
    Broadcast,
    Call,
    Reducescatter,
    SparseAllreduce,
    Tensor,
)

# Another dtype for which all that can be done with the first one can be done too.
_OTHER = {
    "uint8": "int8",
    "int8": "uint8",
    "int16": "float16",
    "int32": "float32",
    "int64": "int32",
    "float16": "bfloat16",
    "bfloat16": "float16",
    "float32": "float64",
    "float64": "int64",
    "bool": "uint8",
}


def disagreements(call: Any, named: bool, members: Sequence[int]) -> list[Call]:
    """Calls of which each is an error with `call`. Named ones of different kinds never meet."""
    found: list[Call] = []
    if isinstance(call, (Allreduce, Reducescatter)):
        found = [*_of_groups(call), *_of_reductions(call)]
    elif isinstance(call, Allgather):
        found = [*_of_groups(call)]
    elif isinstance(call, (Broadcast, Alltoall)):
        found = [dataclasses.replace(call, tensor=tensor) for tensor in _tensors(call.tensor)]
        if isinstance(call, Broadcast):
            roots = [root for root in members if root != call.root]
            found += [dataclasses.replace(call, root=root) for root in roots]
    elif isinstance(call, SparseAllreduce):
        found = [
            dataclasses.replace(call, dtype=_OTHER[call.dtype]),
            dataclasses.replace(call, shape=(call.shape[0] + 1, call.shape[1])),
            dataclasses.replace(call, op="Sum" if call.op == "Average" else "Average"),
        ]
    elif not isinstance(call, Barrier):
        return []
    if not named and getattr(call, "tensors", True):
        kinds: tuple[Any, ...] = (
            Allreduce(),
            Allreduce((Tensor("float32", (3,)), Tensor("int32", (2000,))), grouped=True),
            Broadcast(root=members[0]),
            Allgather(),
            Alltoall(),
            Reducescatter(),
            Barrier(),
        )
        found += [kind for kind in kinds if kind.family != call.family]
    return found


def _tensors(tensor: Tensor) -> list[Tensor]:
    return [
        Tensor(_OTHER[tensor.dtype], tensor.shape),
        Tensor(tensor.dtype, (*tensor.shape, 2)),
        Tensor(tensor.dtype, (*tensor.shape[:-1], tensor.shape[-1] + 1) if tensor.shape else (1,)),
    ]


def _of_groups(call: Any) -> Iterator[Any]:
    """Another tensor, another number of them, or another order; a group or none."""
    for number, tensor in enumerate(call.tensors):
        for other in _tensors(tensor):
            others = (*call.tensors[:number], other, *call.tensors[number + 1 :])
            yield dataclasses.replace(call, tensors=others)
    if not call.tensors:
        return
    has_rows = isinstance(call, Allgather)
    if call.grouped and len(call.tensors) > 1:
        fewer = {"rows": call.rows[:-1]} if has_rows else {}
        yield dataclasses.replace(call, tensors=call.tensors[:-1], **fewer)
        turned = call.tensors[::-1]
        if turned != call.tensors:
            rows = {"rows": call.rows[::-1]} if has_rows else {}
            yield dataclasses.replace(call, tensors=turned, **rows)
    if call.grouped:
        more = {"rows": (*call.rows, call.rows[0])} if has_rows else {}
        yield dataclasses.replace(call, tensors=(*call.tensors, call.tensors[0]), **more)
    if len(call.tensors) == 1:
        yield dataclasses.replace(call, grouped=not call.grouped)


def _of_reductions(call: Allreduce | Reducescatter) -> Iterator[Any]:
    if not call.tensors:
        return
    dtypes = {tensor.dtype for tensor in call.tensors}
    if "bool" in dtypes:
        if isinstance(call, Allreduce):
            yield dataclasses.replace(call, op="Min" if call.op != "Min" else "Max")
        return
    yield dataclasses.replace(call, op="Sum" if call.op != "Sum" else "Average")
    yield dataclasses.replace(call, prescale=call.prescale + 1.0)
    yield dataclasses.replace(call, postscale=call.postscale + 1.0)
