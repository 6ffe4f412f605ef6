"""What a process group posts to the engine, one function per operation of c10d.

The engine reads and writes the caller's tensors where they lie. Each function returns the posting,
and what moves the result to tensors that are not contiguous, to be called when the operation has
ended well (None: all of it is there already).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import _core
from hvdlite.distributed import arguments
from hvdlite.distributed.arguments import fill, landing, movable, reducible
from hvdlite.ops import DTYPES
from hvdlite.result_tensors import gathered_result
from hvdlite.sites import site
from hvdlite.world.teams.team import Team

Tensor = torch.Tensor
Finish = Callable[[Any], None] | None
Posted = tuple[Any, Finish]
# Takes the operation's number: called last, so that a refused argument takes none.
Name = Callable[[], str]

_ALLREDUCE = _core.ALLREDUCE
_ALLGATHER_INTO = _core.ALLGATHER_INTO
_REDUCESCATTER = _core.REDUCESCATTER
_UINT8 = _core.UINT8
_posting = _core.posting


def _post(
    kind: int,
    name: Name,
    dtype: int,
    source: Any,
    result: Any,
    *,
    op: int = 0,
    root: int = 0,
    factor: float = 1.0,
    splits: tuple[int, ...] | None = None,
) -> Any:
    return _posting(
        kind, name(), True, dtype, source, result, op, root, factor, 1.0, splits, None, 0, site(4)
    )


def allreduce(name: Name, tensor: Tensor, op: Any, form: str = "allreduce") -> Posted:
    code, factor = arguments.reduce_op(form, op, tensor.dtype)
    values, dtype = reducible(form, tensor)
    posting = _posting(
        *(_ALLREDUCE, name(), True, dtype, values, values, code, 0, factor, 1.0),
        *(None, None, 0, site(3)),
    )
    if values is tensor or values.data_ptr() == tensor.data_ptr():
        return posting, None
    return posting, lambda _: fill(tensor, values)


def allgather_any(name: Name, flat: Tensor) -> Posted:
    """Gathers tensors of any sizes; `gathered` gives the result."""
    return _post(_core.ALLGATHER, name, DTYPES[flat.dtype], flat, None), None


def gathered(operation: Any, dtype: torch.dtype) -> list[Tensor]:
    """By member, what `allgather_any` has gathered. Once."""
    rows = operation.rows()
    return list(torch.split(gathered_result(operation, dtype), rows))


def broadcast(name: Name, tensor: Tensor, root: int) -> Posted:
    flat = movable("broadcast", tensor)
    posting = _post(_core.BROADCAST, name, DTYPES[flat.dtype], flat, flat, root=root)
    return posting, None if flat is tensor else _filling([tensor], [flat])


def reduce(name: Name, tensor: Tensor, root: int, rank: int, op: Any) -> Posted:
    """Changes the root's tensor alone."""
    code, factor = arguments.reduce_op("reduce", op, tensor.dtype)
    values, dtype = reducible("reduce", tensor)
    result = values if rank == root else None
    posting = _post(_core.REDUCE, name, dtype, values, result, op=code, root=root, factor=factor)
    return posting, None if result is None else _filling([tensor], [values])


def allgather(name: Name, outputs: Sequence[Tensor], tensor: Tensor, rank: int) -> Posted:
    """outputs: by member; their sizes may differ.

    Raises:
        ValueError: This rank's output has another size than its input.
    """
    flat = movable("allgather", tensor)
    flats = tuple(landing("allgather", output) for output in outputs)
    _check_size("allgather", flats[rank], flat)
    sizes = tuple(map(len, flats))
    posting = _post(
        *(_ALLGATHER_INTO, name, DTYPES[flat.dtype], flat, flats),
        splits=_if_uneven(sizes),
    )
    return posting, _filling(outputs, flats)


def allgather_single(name: Name, output: Tensor, tensor: Tensor) -> Posted:
    flat = movable("allgather", tensor)
    result = landing("allgather", output)
    posting = _posting(
        *(_ALLGATHER_INTO, name(), True, DTYPES[flat.dtype], flat, result, 0, 0, 1.0, 1.0),
        *(None, None, 0, site(3)),
    )
    return posting, None if result is output else _filling([output], [result])


def gather(name: Name, outputs: Sequence[Tensor], tensor: Tensor, root: int, rank: int) -> Posted:
    """outputs: by member, on the root."""
    flat = movable("gather", tensor)
    flats = tuple(landing("gather", output) for output in outputs)
    for part in flats:
        _check_size("gather", part, flat)
    result = flats if rank == root else None
    posting = _post(_core.GATHER, name, DTYPES[flat.dtype], flat, result, root=root)
    return posting, _filling(outputs, flats)


def scatter(name: Name, output: Tensor, inputs: Sequence[Tensor], root: int, rank: int) -> Posted:
    """inputs: by member, on the root."""
    result = landing("scatter", output)
    flats = tuple(movable("scatter", tensor) for tensor in inputs)
    for part in flats:
        _check_size("scatter", result, part)
    source = flats if rank == root else None
    posting = _post(_core.SCATTER, name, DTYPES[result.dtype], source, result, root=root)
    return posting, None if result is output else _filling([output], [result])


def alltoall(name: Name, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Posted:
    sources = tuple(movable("alltoall", tensor) for tensor in inputs)
    results = tuple(landing("alltoall", output) for output in outputs)
    posting = _post(
        *(_core.ALLTOALL_INTO, name, DTYPES[sources[0].dtype], sources, results),
        splits=(*map(len, sources), *map(len, results)),
    )
    return posting, _filling(outputs, results)


def alltoall_single(
    name: Name, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
) -> Posted:
    """received, sent: rows, by member. Their numbers travel always, as other ranks may give splits
    where this one gives none."""
    source, result = movable("alltoall", tensor), landing("alltoall", output)
    posting = _post(
        *(_core.ALLTOALL_INTO, name, DTYPES[source.dtype], source, result),
        splits=(*_elements(tensor, source, sent), *_elements(output, result, received)),
    )
    return posting, None if result is output else _filling([output], [result])


def reduce_scatter(name: Name, output: Tensor, inputs: Sequence[Tensor], op: Any) -> Posted:
    """inputs: by member; their sizes may differ."""
    code, factor = arguments.reduce_op("reduce_scatter", op, output.dtype)
    parts = [reducible("reduce_scatter", tensor) for tensor in inputs]
    sources = tuple(part for part, _ in parts)
    result = landing("reduce_scatter", output)
    posting = _post(
        *(_REDUCESCATTER, name, parts[0][1], sources, result),
        op=code,
        factor=factor,
        splits=_if_uneven(tuple(part.numel() for part in sources)),
    )
    return posting, None if result is output else _filling([output], [result])


def reduce_scatter_single(name: Name, output: Tensor, tensor: Tensor, op: Any) -> Posted:
    code, factor = arguments.reduce_op("reduce_scatter", op, output.dtype)
    values, dtype = reducible("reduce_scatter", tensor)
    if values.dim() != 1:
        values = values.view(-1)
    result = landing("reduce_scatter", output)
    posting = _posting(
        *(_REDUCESCATTER, name(), True, dtype, values, result, code, 0, factor, 1.0),
        *(None, None, 0, site(3)),
    )
    return posting, None if result is output else _filling([output], [result])


def barrier(name: Name) -> Posted:
    return _post(_core.BARRIER, name, _UINT8, None, None), None


def _filling(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> Finish:
    """Fills the tensors that do not share their memory with these; None: all do."""
    apart = [
        (tensor, flat)
        for tensor, flat in zip(tensors, flats, strict=True)
        if tensor is not flat and tensor.data_ptr() != flat.data_ptr() and flat.numel()
    ]
    if not apart:
        return None

    def finish(_: Any) -> None:
        for tensor, flat in apart:
            fill(tensor, flat)

    return finish


def _if_uneven(sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if sizes.count(sizes[0]) == len(sizes) else sizes


def _elements(tensor: Tensor, flat: Tensor, rows: Sequence[int]) -> list[int]:
    """Elements of the flat tensor in so many rows of a tensor."""
    count = tensor.size(0) if tensor.dim() else 1
    row = flat.numel() // count if count else 0
    return [number * row for number in rows]


def _check_size(form: str, expected: Tensor, found: Tensor) -> None:
    if len(expected) != len(found):
        raise ValueError(
            f"{form}: a tensor of {len(found) * found.itemsize} bytes, expected "
            f"{len(expected) * expected.itemsize}; parts of the same rank must be of one size"
        )


def post(team: Team, posting: Any, wake: bool) -> Any:
    """wake: False where the caller waits for it next."""
    return team.post(posting, wake)


def send(team: Team, flat: Tensor, to: int, tag: int, wake: bool = True) -> Any:
    return team.engine.send(flat, to, tag, site(3), wake)


def recv(team: Team, flat: Tensor, source: int, tag: int, wake: bool = True) -> Any:
    """source: -1: any."""
    return team.engine.recv(flat, source, tag, site(3), wake)
