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
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.collectives.devices import begin
from hvdlite.collectives.flat_buffers import FlatBuffer
from hvdlite.collectives.groups import Group, parts_of, tensors_of
from hvdlite.collectives.handles import Handle, Several, synchronize
from hvdlite.collectives.posting import BOOL, reduce_op, refuse_in_place
from hvdlite.compression import Compression, Compressor
from hvdlite.ops import Adasum, ReduceOp
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of
from hvdlite.world.teams.team import Team

# Two copies of this many bytes cost about as much as an operation of its own.
FUSED_BYTES = 65536

_dtype_of = _core.dtype_of


class GroupedAllreduce(Allreduce):
    def start_group(self, given: Iterable[torch.Tensor], wake: bool = True) -> Handle:
        form = self.form
        tensors = tensors_of(form, given)
        team = team_of(form, self.process_set)
        if not tensors:
            return Handle(Several(()), [])
        codes = [self.check(team, tensors[0]), *map(_dtype_of, tensors[1:])]
        if min(codes) < 0 or BOOL in codes:
            codes = [self.check(team, tensor) for tensor in tensors]
        if form[-1] == "_":
            for tensor in tensors:
                if tensor.is_neg() or not tensor.is_contiguous():
                    refuse_in_place(form, tensor)
        buckets = self._buckets(tensors, codes)
        shapes = [tensor.shape for tensor in tensors]
        layout: Any = tuple(shapes)
        if len(buckets) > 1 or len(tensors) == 1:
            layout = tuple(zip(codes, [tensor.is_cpu for tensor in tensors], shapes, strict=True))
        parts = parts_of(team, self.kind, self.name, len(tensors), layout)
        handles = []
        for bucket, (part, group) in zip(buckets, parts, strict=False):
            if len(bucket) == 1:
                posting = self.posting(team, tensors[bucket[0]], part, group)
                handles.append(begin(team, posting, wake))
            else:
                members = [tensors[i] for i in bucket]
                buffer = FlatBuffer.of(members, [shapes[i] for i in bucket], group[1])
                handles.append(self._start_fused(team, members, buffer, part, wake, group))
        if len(handles) == 1 < len(tensors):
            return handles[0]

        def finish() -> list[torch.Tensor]:
            results = list(tensors)
            for bucket, handle in zip(buckets, handles, strict=True):
                made = synchronize(handle)
                for i, result in zip(bucket, made if len(bucket) > 1 else [made], strict=True):
                    results[i] = result
            return results

        return Handle(Several([handle.operation for handle in handles]), finish=finish)

    def _buckets(self, tensors: list[torch.Tensor], codes: list[int]) -> list[list[int]]:
        """The tensors that travel together, by their indices; the same on every rank for the same
        shapes, dtypes and devices."""
        buckets: list[list[int]] = []
        small: dict[tuple[int, torch.device], list[int]] = {}
        most = 0 if self.op is Adasum else FUSED_BYTES
        for i, (tensor, code) in enumerate(zip(tensors, codes, strict=True)):
            kind = code, tensor.device
            if not 0 < tensor.nbytes <= most:
                buckets.append([i])
            elif kind in small:
                small[kind].append(i)
            else:
                small[kind] = [i]
                buckets.append(small[kind])
        return buckets

    def _start_fused(
        self,
        team: Team,
        members: list[torch.Tensor],
        buffer: FlatBuffer | None,
        name: str,
        wake: bool,
        group: Group,
    ) -> Handle:
        assert buffer is not None
        buffer.take(members)
        in_place = self.form[-1] == "_"
        how = self.op, self.prescale, self.postscale
        call = Allreduce("grouped_allreduce_", name, self.process_set, how)
        handle = begin(team, call.posting(team, buffer.flat, name, group), wake)
        results: list[torch.Tensor] = []

        def finish() -> list[torch.Tensor]:
            nonlocal buffer, results
            synchronize(handle)
            idle = buffer
            if idle is not None:
                if in_place:
                    places = members
                else:
                    # Own memory for each: a view would keep the whole buffer and share its version.
                    places = [
                        torch.empty_like(m, memory_format=torch.contiguous_format) for m in members
                    ]
                idle.give(places)
                # Only once, also if a call that was interrupted is repeated: another group may own
                # the buffer by then.
                if buffer is not None:
                    results, buffer = places, None
                    idle.keep()
            return results

        return Handle(handle.operation, finish=finish)


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
    how = reduce_op(average, op), prescale_factor, postscale_factor
    call = GroupedAllreduce("grouped_allreduce", name, process_set, how)
    return call.run_group(tensors, compression)


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
    how = reduce_op(average, op), prescale_factor, postscale_factor
    return GroupedAllreduce("grouped_allreduce", name, process_set, how).start_group(tensors)


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
        ValueError: A bad argument, or a tensor that is not contiguous.
        HorovodInternalError: The ranks' groups do not match. The tensors' contents are then
            undefined.

    Example:
        On rank 0 of 2:

        >>> tensors = [torch.ones(1), torch.ones(2)]
        >>> hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="pair")
        [tensor([2.]), tensor([2., 2.])]
    """
    how = reduce_op(average, op), prescale_factor, postscale_factor
    return GroupedAllreduce("grouped_allreduce_", name, process_set, how).run_group(tensors)


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
    returns their list.

    Arguments and errors are those of `grouped_allreduce_`. The tensors must not be used before the
    end.

    Example:
        On rank 0 of 2:

        >>> tensors = [torch.ones(1), torch.ones(2)]
        >>> handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum)
        >>> hvd.synchronize(handle)
        [tensor([2.]), tensor([2., 2.])]
    """
    how = reduce_op(average, op), prescale_factor, postscale_factor
    return GroupedAllreduce("grouped_allreduce_", name, process_set, how).start_group(tensors)
