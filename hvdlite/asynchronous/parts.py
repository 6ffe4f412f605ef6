"""Parts of parameters: how they are cut, which server has which, and where they lie there."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdlite.asynchronous.partitioners import Partitioner

# Each part begins at a multiple of this: so that views of any dtype and the vector units are happy.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Part:
    """Some rows of one parameter; all of them if it is not cut.

    param: The parameter's number in the optimizer, through all groups.
    group: The number of its parameter group.
    shape: Of this part. A parameter without dimensions has one part of its shape, with one row.
    """

    param: int
    name: str
    group: int
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part's rows of a tensor with the parameter's shape."""
        if not self.shape or self.shape[0] == whole.shape[0]:
            return whole
        return whole[self.begin : self.end]


@dataclass(frozen=True)
class Layout:
    """The parts of one server, one after the other in one piece of memory.

    offsets: By part, its first byte.
    """

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    size_bytes: int

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parts as tensors in this memory, which is uint8."""
        return [
            memory[offset : offset + part.size_bytes].view(part.dtype).view(part.shape)
            for part, offset in zip(self.parts, self.offsets, strict=True)
        ]

    def digest(self) -> int:
        """Differs, all but surely, from that of another layout: each message carries it."""
        words = [
            (p.param, p.group, p.begin, p.end, p.shape, str(p.dtype), offset)
            for p, offset in zip(self.parts, self.offsets, strict=True)
        ]
        return zlib.crc32(repr(words).encode())


def cut(
    index: int,
    name: str,
    group: int,
    param: torch.Tensor,
    partitioner: Partitioner | None,
) -> list[Part]:
    """A parameter's parts, whose rows differ in number by one at most; the first have more."""
    shape = tuple(param.shape)
    rows = shape[0] if shape else 1
    count = partitioner.num_parts(shape, param.element_size()) if partitioner is not None else 1
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= max(1, rows):
        raise ValueError(
            f"{type(partitioner).__name__}.num_parts gave {count!r} for parameter {name!r} of "
            f"shape {list(shape)}; expected a number from 1 to {max(1, rows)}"
        )
    each, more = divmod(rows, count)
    parts = []
    begin = 0
    for number in range(count):
        end = begin + each + (number < more)
        part_shape = (end - begin, *shape[1:]) if shape else shape
        parts.append(Part(index, name, group, begin, end, part_shape, param.dtype))
        begin = end
    return parts


def deal(parts: Sequence[Part], num_servers: int) -> list[Layout]:
    """Deals the parts to servers by size: the largest first, each to the server that has the fewest
    bytes so far (of equals, the lowest). Depends on nothing but its arguments."""
    loads = [0] * num_servers
    dealt: list[list[int]] = [[] for _ in range(num_servers)]
    order = sorted(range(len(parts)), key=lambda i: (-parts[i].size_bytes, i))
    for index in order:
        server = min(range(num_servers), key=lambda s: (loads[s], s))
        loads[server] += max(1, parts[index].size_bytes)
        dealt[server].append(index)
    return [_laid_out([parts[index] for index in sorted(mine)]) for mine in dealt]


def _laid_out(parts: Sequence[Part]) -> Layout:
    offsets = []
    end = 0
    for part in parts:
        offsets.append(end)
        end += -(-part.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return Layout(tuple(parts), tuple(offsets), max(end, _ALIGNMENT_BYTES))
