"""Times operations of torch.distributed, called as users call them, on hvdlite and on Gloo.

As everywhere: inputs are written immediately before every call, contenders take turns in every
round, and every result is checked.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.allreduce import SHIFTS, pattern
from benchmarks.figures import BOUND, size_text
from benchmarks.groups import Group
from benchmarks.plan import Effort, calls, rotated, warm_up_rounds
from benchmarks.turns import rest

# As torch has called them since 2.13.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Shape:
    """Whose call it is, and how many elements the larger of its tensors has."""

    rank: int
    size: int
    count: int

    @property
    def part(self) -> int:
        return self.count // self.size


@dataclass(frozen=True)
class Operation:
    """inputs, outputs: elements of the two tensors. run(output, input, group, shape) is timed;
    expected(inputs by rank, shape) is what it makes."""

    inputs: Callable[[Shape], int]
    outputs: Callable[[Shape], int]
    run: Callable[[Tensor, Tensor, dist.ProcessGroup, Shape], object]
    expected: Callable[[list[Tensor], Shape], Tensor]
    bound: bool = False  # whether a copy of the larger tensor is a bound


def whole(shape: Shape) -> int:
    return shape.count


def part(shape: Shape) -> int:
    return shape.part


def total(inputs: list[Tensor]) -> Tensor:
    return torch.stack(inputs).sum(dim=0)


def all_reduce(output: Tensor, source: Tensor, group: dist.ProcessGroup, shape: Shape) -> None:
    dist.all_reduce(source, group=group)


def there_and_back(output: Tensor, source: Tensor, group: dist.ProcessGroup, shape: Shape) -> None:
    """Two messages, one after the other, between the ranks 2k and 2k+1."""
    other = shape.rank ^ 1
    if shape.rank < other:
        dist.send(source, other, group=group)
        dist.recv(output, other, group=group)
    else:
        dist.recv(output, other, group=group)
        dist.send(source, other, group=group)


OPERATIONS = {
    "all_gather_into_tensor": Operation(
        part,
        whole,
        lambda output, source, group, _: all_gather(output, source, group=group),
        lambda inputs, _: torch.cat(inputs),
        bound=True,
    ),
    "reduce_scatter_tensor": Operation(
        whole,
        part,
        lambda output, source, group, _: reduce_scatter(output, source, group=group),
        lambda inputs, shape: total(inputs)[shape.rank * shape.part :][: shape.part],
    ),
    "all_to_all_single": Operation(
        whole,
        whole,
        lambda output, source, group, _: dist.all_to_all_single(output, source, group=group),
        lambda inputs, shape: torch.cat(
            [source[shape.rank * shape.part :][: shape.part] for source in inputs]
        ),
        bound=True,
    ),
    # In place: its output is its input.
    "all_reduce": Operation(whole, lambda _: 0, all_reduce, lambda inputs, _: total(inputs)),
    "send and recv, there and back": Operation(
        whole, whole, there_and_back, lambda inputs, shape: inputs[shape.rank ^ 1]
    ),
}
IN_PLACE = all_reduce


class Tensors:
    """What a round works on. x[j] of a rank's input is another one than that of any other rank."""

    def __init__(self, operation: Operation, shape: Shape, calls: int) -> None:
        self.operation, self.shape = operation, shape
        elems = operation.inputs(shape)
        self.all_inputs = [pattern(elems, rank, shape.size) for rank in range(shape.size)]
        self.inputs = [torch.empty(elems) for _ in range(calls)]
        self.outputs = [torch.empty(operation.outputs(shape)) for _ in range(calls)]
        self._expected: tuple[int, Tensor] | None = None  # the last shift, and what it makes

    def write(self, shift: int) -> None:
        for tensor in self.inputs:
            torch.add(self.all_inputs[self.shape.rank], shift, out=tensor)
        for tensor in self.outputs:
            tensor.fill_(-1)

    def are_right(self, shift: int) -> bool:
        if self._expected is None or self._expected[0] != shift:
            inputs = [one + shift for one in self.all_inputs]
            self._expected = shift, self.operation.expected(inputs, self.shape)
        expected = self._expected[1]
        found = self.inputs if self.operation.run is IN_PLACE else self.outputs
        return all(torch.equal(tensor, expected) for tensor in found)


def time_operation(
    name: str, size_bytes: int, effort: Effort, comm: Any, groups: Mapping[str, Group]
) -> dict[str, list[float]]:
    """This rank's seconds per call, by contender and round. size_bytes: of the larger tensor.
    Collective."""
    operation = OPERATIONS[name]
    shape = Shape(comm.rank, comm.size, size_bytes // 4)
    tensors = Tensors(operation, shape, calls(size_bytes))
    pairs = list(zip(tensors.outputs, tensors.inputs, strict=True))
    # By all ranks at once, of the larger tensor.
    copied, target = (torch.zeros(shape.count if operation.bound else 0) for _ in range(2))

    names = [*groups, *([BOUND] if operation.bound else [])]
    times_s: dict[str, list[float]] = {contender: [] for contender in names}
    warm_up = warm_up_rounds(size_bytes)
    begin, round_, done = time.perf_counter(), 0, False
    while not done:
        shift = round_ % SHIFTS
        for contender in rotated(names, round_):
            if contender == BOUND:
                copied.fill_(shift)
                comm.Barrier()
                start = time.perf_counter()
                target.copy_(copied)
                seconds = time.perf_counter() - start
            else:
                tensors.write(shift)
                group = groups[contender].group
                comm.Barrier()
                groups[contender].enter()
                start = time.perf_counter()
                for output, source in pairs:
                    operation.run(output, source, group, shape)
                seconds = (time.perf_counter() - start) / len(pairs)
                groups[contender].leave()
                rest(comm)
                if not tensors.are_right(shift):
                    raise AssertionError(
                        f"{contender}: wrong result of {name} of {size_text(size_bytes)}"
                        f" on rank {comm.rank}"
                    )
            if round_ >= warm_up:
                times_s[contender].append(seconds)
        round_ += 1
        done = comm.bcast(effort.enough(round_ - warm_up, time.perf_counter() - begin))
    return times_s
