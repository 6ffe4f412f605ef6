"""What a step of a program gives each rank, computed in one process from all ranks' inputs.

The inputs are pseudorandom, other ones for each rank, step and tensor, and so small (or, for
integers that may wrap, so large) that every result is exact in its dtype, whatever the order of
summation. Only Adasum's results are compared with a tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.core.scaling import finished, times, widened
from tests.properties.calls import (
    Allgather,
    AllgatherObject,
    Allreduce,
    Alltoall,
    Barrier,
    Broadcast,
    BroadcastObject,
    Compressed,
    Gradient,
    Reducescatter,
    SparseAllreduce,
    Tensor,
)
from tests.properties.programs import Program, Step

# Times 1, 2, 3 or 4, its sum over any ranks is a multiple of the number of ranks.
WEIGHT = 12.0


def dtype_of(tensor: Tensor) -> torch.dtype:
    return getattr(torch, tensor.dtype)  # type: ignore[no-any-return]


# ---- inputs ----


def inputs(index: int, rank: int, call: Any, members: Sequence[int]) -> list[torch.Tensor]:
    """The tensors that a rank passes to a call as step `index`; contiguous."""
    if isinstance(call, (Gradient, Compressed)):
        return inputs(index, rank, call.of, members)
    if isinstance(call, SparseAllreduce):
        return [_sparse_input(index, rank, call, members)]
    if isinstance(call, (Barrier, AllgatherObject, BroadcastObject)):
        return []
    return [
        _values(tensor, call, len(members), 1009 * index + 31 * number + rank)
        for number, tensor in enumerate(_whole(call, rank, members))
    ]


def _whole(call: Any, rank: int, members: Sequence[int]) -> list[Tensor]:
    """With the first dimensions that the rank's tensors have."""
    if isinstance(call, Allgather):
        return [
            Tensor(tensor.dtype, (rows[rank], *tensor.shape))
            for tensor, rows in zip(call.tensors, call.rows, strict=True)
        ]
    if isinstance(call, Alltoall):
        rows = sum(split_of(call, rank, members)) + call.rest
        return [Tensor(call.tensor.dtype, (rows, *call.tensor.shape))]
    if isinstance(call, Broadcast):
        return [call.tensor]
    return list(call.tensors)


def split_of(call: Alltoall, rank: int, members: Sequence[int]) -> list[int]:
    """How many rows a rank sends to each member."""
    if call.splits is None:
        return [call.even] * len(members)
    return [call.splits[rank][member] for member in members]


def _values(tensor: Tensor, call: Any, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype, op = dtype_of(tensor), getattr(call, "op", "Sum")

    def whole_numbers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, tensor.shape, generator=generator)

    if dtype is torch.bool:
        return whole_numbers(0, 2) == 0
    scaled = getattr(call, "prescale", 1.0) != 1.0 or getattr(call, "postscale", 1.0) != 1.0
    if dtype.is_floating_point:
        if op == "Product":
            signs = 1 - 2 * whole_numbers(0, 1)
            return (torch.tensor(2.0) ** whole_numbers(-1, 1) * signs).to(dtype)
        step = size if op == "Average" else 1
        return (whole_numbers(-4, 4) * step).to(dtype)
    lowest = 0 if dtype is torch.uint8 else -1
    if op == "Product" and scaled:
        return whole_numbers(lowest, 2).to(dtype)
    if op in ("Average", "Adasum") or scaled:
        return whole_numbers(20 * lowest, 20).to(dtype)
    # These wrap.
    return torch.randint(-(1 << 62), 1 << 62, tensor.shape, generator=generator).to(dtype)


def _sparse_input(
    index: int, rank: int, call: SparseAllreduce, members: Sequence[int]
) -> torch.Tensor:
    elements = call.elements[rank]
    generator = torch.Generator().manual_seed(1009 * index + rank)
    rows, columns = (
        torch.randint(0, max(1, extent), (elements,), generator=generator) for extent in call.shape
    )
    values = _values(Tensor(call.dtype, (elements,)), call, len(members), 1009 * index + rank)
    return torch.sparse_coo_tensor(
        torch.stack([rows, columns]), values, call.shape, check_invariants=False
    )


# ---- results ----


def results(program: Program, index: int, rank: int) -> list[Any]:
    """What the call gives the rank: its tensors, or objects."""
    step = program.steps[index]
    assert isinstance(step, Step)
    members = program.sets()[step.on]
    return _results(index, rank, step.call, members, program.comers(index))


def _results(
    index: int, rank: int, call: Any, members: Sequence[int], comers: Sequence[int]
) -> list[Any]:
    if isinstance(call, (Gradient, Compressed)):
        return _results(index, rank, call.of, members, comers)
    if isinstance(call, Barrier):
        return []
    if isinstance(call, AllgatherObject):
        return [[object_of(index, member) for member in members]]
    if isinstance(call, BroadcastObject):
        return [object_of(index, call.root)]
    given = {member: inputs(index, member, call, members) for member in comers}
    if isinstance(call, Broadcast):
        return given[call.root]
    if isinstance(call, Allgather):
        return [torch.cat(parts) for parts in zip(*given.values(), strict=True)]
    if isinstance(call, Alltoall):
        return _exchanged(call, rank, members, given)
    if isinstance(call, SparseAllreduce):
        return [_sparse_result(call, members, given)]
    reduced = [
        reduce(call, [given[member][number] for member in comers], members, comers)
        for number in range(len(call.tensors))
    ]
    if isinstance(call, Allreduce):
        return reduced
    assert isinstance(call, Reducescatter)
    return [own_rows(tensor, rank, members) for tensor in reduced]


def object_of(index: int, rank: int) -> Any:
    """What a rank passes to a collective of objects."""
    return {"step": index, "rank": rank, "text": "x" * (37 * rank)}


def own_rows(tensor: torch.Tensor, rank: int, members: Sequence[int]) -> torch.Tensor:
    """A member's rows of what is scattered."""
    rows, more = divmod(len(tensor), len(members))
    sizes = [rows + (place < more) for place in range(len(members))]
    return torch.split(tensor, sizes)[members.index(rank)]


def _exchanged(
    call: Alltoall, rank: int, members: Sequence[int], given: dict[int, list[torch.Tensor]]
) -> list[torch.Tensor]:
    own = members.index(rank)
    parts = []
    for member in members:
        split = split_of(call, member, members)
        begin = sum(split[:own])
        parts.append(given[member][0][begin : begin + split[own]])
    return [torch.cat(parts), torch.tensor([len(part) for part in parts], dtype=torch.int32)]


def _sparse_result(
    call: SparseAllreduce, members: Sequence[int], given: dict[int, list[torch.Tensor]]
) -> torch.Tensor:
    """Dense, summed up in int64 or float64 as duplicates of one rank count too."""
    dtype = getattr(torch, call.dtype)
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    total = torch.zeros(call.shape, dtype=wide)
    for (tensor,) in given.values():
        rows, columns = tensor._indices()
        total.index_put_((rows, columns), tensor._values().to(wide), accumulate=True)
    total = total.to(dtype)  # exact, or wrapped
    return finished(widened(total), dtype, call.op, 1.0, len(members))


# ---- reduction ----


def reduce(
    call: Any, tensors: list[torch.Tensor], members: Sequence[int], comers: Sequence[int]
) -> torch.Tensor:
    """The tensors of those who come, as one."""
    dtype = tensors[0].dtype
    if call.op == "Adasum":
        come = dict(zip(comers, map(widened, tensors), strict=True))
        zero = torch.zeros_like(come[comers[0]])
        everyones = [times(call.prescale, come.get(member, zero)).double() for member in members]
        return times(call.postscale, adasum(everyones).to(zero.dtype)).to(dtype)
    given = [times(call.prescale, widened(tensor)) for tensor in tensors]
    if dtype is torch.bool:
        stacked = torch.stack(given)
        return stacked.any(0) if call.op in ("Sum", "Max") else stacked.all(0)
    wide = torch.stack(given).to(torch.float64 if dtype.is_floating_point else torch.int64)
    if call.op == "Min":
        combined = wide.amin(0)
    elif call.op == "Max":
        combined = wide.amax(0)
    elif call.op == "Product":
        combined = wide.prod(0)
    else:
        combined = wide.sum(0)
    # Exact, or wrapped.
    return finished(combined.to(given[0].dtype), dtype, call.op, call.postscale, len(members))


def adasum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In float64: the members from the largest power of two on are combined with the first ones,
    then pairs at distance 1, 2, 4."""
    power = 1 << (len(tensors).bit_length() - 1)
    level = tensors[:power]
    for place, tensor in enumerate(tensors[power:]):
        level[place] = _adasum_of_two(level[place], tensor)
    while len(level) > 1:
        level = [_adasum_of_two(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _adasum_of_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product, a_square, b_square = (a * b).sum(), (a * a).sum(), (b * b).sum()
    if a_square == 0 or b_square == 0:
        return a + b
    return (1 - product / (2 * a_square)) * a + (1 - product / (2 * b_square)) * b


# ---- gradients ----


def gradients(program: Program, index: int, rank: int) -> list[torch.Tensor]:
    """What the backward of a `Gradient` leaves in the rank's inputs: the gradient of the results,
    rank r's, is WEIGHT * (r + 1) everywhere."""
    step = program.steps[index]
    assert isinstance(step, Step)
    assert isinstance(step.call, Gradient)
    call, members, comers = step.call.of, program.sets()[step.on], program.comers(index)
    own = inputs(index, rank, call, members)
    mean = sum(weight(member) for member in comers) / len(members)
    if isinstance(call, Allreduce):
        value = sum(weight(member) * call.prescale for member in comers) * call.postscale
        value = value / len(members) if call.op == "Average" else value
        return [torch.full_like(tensor, value) for tensor in own]
    if isinstance(call, Allgather):
        return [torch.full_like(tensor, mean) for tensor in own]
    if isinstance(call, Broadcast):
        return [torch.full_like(own[0], mean if rank == call.root else 0.0)]
    if isinstance(call, Alltoall):
        split = split_of(call, rank, members)
        rows = [
            torch.full((count, *call.tensor.shape), weight(member), dtype=own[0].dtype)
            for count, member in zip(split, members, strict=True)
        ]
        return [torch.cat([*rows, torch.zeros(call.rest, *call.tensor.shape, dtype=own[0].dtype)])]
    factor = call.prescale * call.postscale * (len(members) if call.op == "Sum" else 1)
    found = []
    for tensor in own:
        owned = [len(own_rows(tensor, member, members)) for member in members]
        found.append(
            torch.cat(
                [
                    torch.full(
                        (rows, *tensor.shape[1:]), weight(member) * factor, dtype=tensor.dtype
                    )
                    for rows, member in zip(owned, members, strict=True)
                ]
            )
        )
    return found


def weight(rank: int) -> float:
    return WEIGHT * (rank + 1)


# ---- comparison ----


def mismatch(got: Any, wanted: Any, exact: bool = True) -> str:
    """How a result differs from the oracle's; empty if it doesn't."""
    if not isinstance(wanted, torch.Tensor):
        return "" if got == wanted else f"{got!r}, not {wanted!r}"
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__}, not a tensor"
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return f"{got.dtype}{list(got.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    different = got != wanted
    if not exact and got.numel():
        wide = wanted.double()
        most = wide.abs().max().item()
        eps = torch.finfo(got.dtype).eps if got.dtype.is_floating_point else 0.0
        # Integers are truncated, so that the least difference may cost one.
        least = 1e-9 * most if got.dtype.is_floating_point else 1.0
        different = (got.double() - wide).abs() > max(eps, 1e-12) * wide.abs() + least
    if not different.any():
        return ""
    where = tuple(different.nonzero()[0].tolist())
    return (
        f"{int(different.sum())} of {got.numel()} elements differ, the first {list(where)} is "
        f"{got[where].item()}, not {wanted[where].item()}"
    )
