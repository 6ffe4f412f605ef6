"""grouped_allreduce: many tensors; the small ones travel as one.

Small tensors of one dtype and one device are copied to a flat buffer, reduced there in one
operation, and copied back. A tensor above FUSED_BYTES is an operation of its own, since copying it
twice costs more; so is every tensor with Adasum, whose dot products are over whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.allreduce import start
from hvdlite.collectives.devices import begin
from hvdlite.collectives.flat_buffers import FlatBuffer
from hvdlite.collectives.groups import Group, backward_of, ending, parts_of, tensors_of
from hvdlite.collectives.handles import Handle, Several, synchronize
from hvdlite.collectives.posting import (
    checked,
    checked_compression,
    differentiable,
    factors,
    label,
    named,
    reduce_op,
    refuse_in_place,
)
from hvdlite.compression import Compression, Compressor
from hvdlite.ops import DTYPES, Adasum, ReduceOp
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of
from hvdlite.world.teams.team import Team

# Two copies of this many bytes cost about as much as an operation of its own.
FUSED_BYTES = 65536

_ALLREDUCE = _core.ALLREDUCE
_none = Compression.none


def grouped_allreduce(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors at once; the list of the results. Blocks. Differentiable.

    Every rank passes the same number of tensors, of the same shapes and dtypes. One group may mix
    dtypes and devices. The other arguments are those of `allreduce`.

    Raises:
        ValueError: A bad argument; then nothing is sent.
        HorovodInternalError: The ranks' groups do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2:

        >>> hvd.grouped_allreduce([torch.ones(1), torch.ones(2)], op=hvd.Sum, name="pair")
        [tensor([2.]), tensor([2., 2.])]
    """
    tensors = tensors_of("grouped_allreduce", tensors)
    if compression is not _none:
        checked_compression("grouped_allreduce", compression)
        for tensor in tensors:
            checked("grouped_allreduce", tensor)
        pairs = [compression.compress(tensor) for tensor in tensors]
        tensors = [tensor for tensor, _ in pairs]
    if any(map(differentiable, tensors)):
        results = _GroupedAllreduce.apply(  # type: ignore[no-untyped-call]
            name,
            reduce_op(average, op),
            prescale_factor,
            postscale_factor,
            process_set,
            *tensors,
        )
    else:
        results = synchronize(
            _start(
                "grouped_allreduce",
                tensors,
                average,
                name,
                op,
                prescale_factor,
                postscale_factor,
                process_set,
                False,
            )
        )
    if compression is not _none:
        results = [
            compression.decompress(result, ctx)
            for result, (_, ctx) in zip(results, pairs, strict=True)
        ]
    return list(results)


def grouped_allreduce_async(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `grouped_allreduce` and returns; `synchronize` gives the list of the results.

    Arguments and errors are those of `grouped_allreduce`, without `compression`. The group is one
    operation to `poll` and `synchronize`. The inputs must not change before the end. Not
    differentiable.

    Example:
        On rank 0 of 2:

        >>> handle = hvd.grouped_allreduce_async([torch.ones(1), torch.ones(2)], op=hvd.Sum)
        >>> hvd.synchronize(handle)
        [tensor([2.]), tensor([2., 2.])]
    """
    return _start(
        "grouped_allreduce",
        tensors,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
    )


def grouped_allreduce_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`grouped_allreduce` in place: the results overwrite the tensors, which are returned. Blocks.

    Not differentiable.

    Raises:
        ValueError: A bad argument; also where a tensor is not contiguous.
        HorovodInternalError: The ranks' groups do not match. The tensors' contents are then
            undefined.

    Example:
        On rank 0 of 2:

        >>> tensors = [torch.ones(1), torch.ones(2)]
        >>> hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="pair")
        [tensor([2.]), tensor([2., 2.])]
    """
    return synchronize(  # type: ignore[no-any-return]
        _start(
            "grouped_allreduce_",
            tensors,
            average,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            False,
        )
    )


def grouped_allreduce_async_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `grouped_allreduce_` and returns; `synchronize` puts the results into the tensors, and
    gives their list.

    Arguments and errors are those of `grouped_allreduce_`. The tensors must not be used before the
    end.

    Example:
        On rank 0 of 2:

        >>> tensors = [torch.ones(1), torch.ones(2)]
        >>> handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum)
        >>> hvd.synchronize(handle)
        [tensor([2.]), tensor([2., 2.])]
    """
    return _start(
        "grouped_allreduce_",
        tensors,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
    )


def _start(
    form: str,
    given: Iterable[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    wake: bool,
) -> Handle:
    """form: the function that the user called; in place if it ends in "_"."""
    tensors = tensors_of(form, given)
    if average is not None or op.__class__ is not ReduceOp:
        op = reduce_op(average, op)
    assert op is not None
    team = team_of(form, process_set)
    if not tensors:
        return Handle(Several(()), [])
    layout: tuple[Any, ...]
    if _are_one_bucket(form, tensors, op):
        buckets = [list(range(len(tensors)))]
        layout = tuple([tensor.shape for tensor in tensors])
    else:
        codes = [checked(form, tensor, op) for tensor in tensors]
        if form[-1] == "_":
            for tensor in tensors:
                refuse_in_place(form, tensor)
        buckets = _buckets(tensors, op)
        if len(buckets) == 1 < len(tensors):
            # As above: other ranks' tensors may be contiguous where one of this rank's is not.
            layout = tuple([tensor.shape for tensor in tensors])
        else:
            layout = tuple(
                [(code, t.is_cpu, t.shape) for code, t in zip(codes, tensors, strict=True)]
            )
    for bucket in buckets:
        code = DTYPES[tensors[bucket[0]].dtype]
        prescale, postscale = factors(form, code, prescale, postscale)
    handles = []
    parts = parts_of(team, "allreduce", name, len(tensors), layout)
    for bucket, (part, group) in zip(buckets, parts, strict=False):
        members = [tensors[i] for i in bucket] if len(buckets) > 1 else tensors
        begin = _start_fused if len(bucket) > 1 else _start_alone
        handles.append(
            begin(form, members, part, op, prescale, postscale, process_set, wake, group)
        )
    if len(handles) == 1 and name is None:
        return handles[0]

    def finish() -> list[torch.Tensor]:
        results = list(tensors)
        for bucket, handle in zip(buckets, handles, strict=True):
            for i, result in zip(bucket, synchronize(handle), strict=True):
                results[i] = result
        return results

    operations = Several(
        [handle.operation for handle in handles],
        ending(team, "allreduce", name, handles),
    )
    return Handle(operations, finish=finish)


def _are_one_bucket(form: str, tensors: list[torch.Tensor], op: ReduceOp) -> bool:
    """Whether all are small, contiguous, of one dtype and device: the usual case, made fast. Checks
    them on the way."""
    first = tensors[0]
    code = checked(form, first, op)
    device, most = first.device, FUSED_BYTES // first.itemsize
    for t in tensors:
        if (
            checked(form, t, op) != code
            or t.device != device
            or not t.is_contiguous()
            or t.is_neg()
            or not 0 < t.numel() <= most
        ):
            return False
    return len(tensors) > 1 and op is not Adasum


def _buckets(tensors: list[torch.Tensor], op: ReduceOp) -> list[list[int]]:
    """The tensors that travel together, by their indices; the same on every rank for the same
    shapes, dtypes and devices."""
    buckets: list[list[int]] = []
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        if op is Adasum or not 0 < tensor.nbytes <= FUSED_BYTES:
            buckets.append([i])
        elif kind in small:
            small[kind].append(i)
        else:
            small[kind] = [i]
            buckets.append(small[kind])
    return buckets


def _start_alone(
    form: str,
    members: list[torch.Tensor],
    name: str,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    wake: bool,
    group: Group,
) -> Handle:
    (tensor,) = members
    handle = start(form, tensor, None, name, op, prescale, postscale, process_set, wake, group)
    return Handle(handle.operation, finish=lambda: [synchronize(handle)])


def _start_fused(
    form: str,
    members: list[torch.Tensor],
    name: str,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    wake: bool,
    group: Group,
) -> Handle:
    team = team_of(form, process_set)
    buffer: FlatBuffer | None = FlatBuffer.of(members, group[1])
    assert buffer is not None
    buffer.take(members)
    handle = _start_flat(team, buffer.flat, name, op, prescale, postscale, wake, group)
    results: list[torch.Tensor] = []

    def finish() -> list[torch.Tensor]:
        nonlocal buffer, results
        synchronize(handle)
        idle = buffer
        if idle is not None:
            if form[-1] == "_":
                places = members
            else:
                # Own memory for each: a view would keep the whole buffer and share its version.
                places = [
                    torch.empty_like(m, memory_format=torch.contiguous_format) for m in members
                ]
            idle.give(places)
            # Only once, also if a call that was interrupted is repeated: another group may own the
            # buffer by then.
            if buffer is not None:
                results, buffer = places, None
                idle.keep()
        return results

    return Handle(handle.operation, finish=finish)


def _start_flat(
    team: Team,
    flat: torch.Tensor,
    name: str,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    wake: bool,
    group: Group,
) -> Handle:
    """An allreduce in place."""
    name, unnamed = named(team, name)
    posting = _core.posting(
        *(_ALLREDUCE, name, unnamed, DTYPES[flat.dtype], flat, flat, op),
        prescale=prescale,
        postscale=postscale,
        group=group,
        site=site(4),
    )
    return begin(team, posting, wake)


class _GroupedAllreduce(torch.autograd.Function):
    """Forward and backward are the same allreduce, with the same op and factors."""

    @staticmethod
    def forward(ctx: Any, name: str | None, *rest: Any) -> Any:
        op, prescale, postscale, process_set, *tensors = rest
        form = "grouped_allreduce"
        backward = f"{label(form, name, process_set)}.grad"
        ctx.arguments = (backward, _none, op, prescale, postscale, process_set)
        return tuple(
            synchronize(
                _start(form, tensors, None, name, op, prescale, postscale, process_set, False)
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, *rest = ctx.arguments
        results = backward_of(grads, lambda some: grouped_allreduce(some, None, name, *rest))
        return None, None, None, None, None, *results
