"""Inputs that differ between all ranks and elements, and the expected results, in closed form.

The sum's input is x[j] = rank + size * j: a rank that is dropped, doubled or shifted changes the
result. Every input, sum and quotient is a number that the element type holds exactly; where j grows
beyond that it starts again at 0, with an odd period, so that no power of two hides a shift.
"""

from __future__ import annotations

import torch

INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*INTEGERS, *FLOATS, "bool")


def mostly_on_few_ranks(dtypes, everywhere, many=(7, "1,3,3")):
    """Parameters: the dtypes in `everywhere` run in all worlds, the others in worlds of many ranks,
    which take seconds, only in `make test-wide`."""
    import pytest  # the programs for GPUs use the rest of this file where pytest may be absent

    wide = pytest.mark.wide_in(*many)
    return [d if d in everywhere else pytest.param(d, marks=wide) for d in dtypes]


# One of each width: enough where the path of the data depends only on its size in bytes.
WIDTHS = ("uint8", "bfloat16", "float32", "int64")

# The largest whole number up to which a type holds all whole numbers.
_EXACT = {"float16": 1 << 11, "bfloat16": 1 << 8, "float32": 1 << 24, "float64": 1 << 53}


def ops_of(dtype: str) -> tuple[str, ...]:
    """The reduce ops that an element type has."""
    ops = ("Sum", "Average", "Min", "Max", "Product")
    return tuple(op for op in ops if (dtype, op) != ("bool", "Average"))


def case_of(dtype: str, op: str, rank: int, size: int, count: int) -> tuple[torch.Tensor, ...]:
    """This rank's input and the result of an allreduce."""
    index = torch.arange(count)
    if dtype == "bool":
        given, result = _logical(op, rank, size, index)
    elif op == "Product":
        given, result = _product(dtype, rank, size, index)
    elif op in ("Min", "Max"):
        given, result = _extreme(dtype, op, rank, size, index)
    else:
        given, result = _sum(dtype, op, rank, size, index)
    # From int64 to a narrower integer type this wraps, as sums do.
    return given.to(getattr(torch, dtype)), result.to(getattr(torch, dtype))


def _odd(period: int) -> int:
    return max(1, period - (period % 2 == 0))


def _sum(
    dtype: str, op: str, rank: int, size: int, index: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    first = size * (size - 1) // 2
    if dtype in FLOATS:
        period = _odd(min((_EXACT[dtype] - first) // size**2 + 1, 1 << 40))
        step = index % period
        total = first + size**2 * step
        return rank + size * step, total if op == "Sum" else total.double() / size
    if op == "Sum":
        return rank + size * index, first + size**2 * index
    # The sum does not wrap here; it is below zero in places, and size divides it nowhere.
    highest = torch.iinfo(getattr(torch, dtype)).max
    most = min((highest - first - 1) // size**2, 500)
    least = 0 if dtype == "uint8" else -most
    step = index % _odd(most + 1 - least) + least
    total = first + size**2 * step + 1
    return rank + size * step + (rank == 0), torch.div(total, size, rounding_mode="trunc")


def _extreme(
    dtype: str, op: str, rank: int, size: int, index: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Each rank has the smallest and the largest element in its turn."""
    highest = _EXACT.get(dtype) or torch.iinfo(getattr(torch, dtype)).max
    period = _odd(min(highest // size, 1001))
    step = size * (index % period - (0 if dtype == "uint8" else period // 2))
    return step + (index + rank) % size, step + (0 if op == "Min" else size - 1)


def _product(dtype: str, rank: int, size: int, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    factors = torch.tensor([1.0, -2.0, 0.5]) if dtype in FLOATS else torch.tensor([1, 3, 5])
    results = torch.stack([factors.roll(-member) for member in range(size)]).prod(dim=0)
    return factors[(index + rank) % 3], results[index % 3]


def _logical(op: str, rank: int, size: int, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One rank decides each element; at every (size + 1)-th none does."""
    decided = index % (size + 1)
    if op in ("Sum", "Max"):
        return decided == rank, decided < size
    return decided != rank, decided == size


def mismatch(got: torch.Tensor, expected: torch.Tensor, exact: bool = True) -> str:
    """Where two tensors differ; empty if they don't."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype}{list(got.shape)} for {expected.dtype}{list(expected.shape)}"
    if torch.equal(got, expected):
        return ""
    different = (got != expected).flatten()
    if not exact:
        # An average multiplies by 1 / size, which is not exact for all sizes.
        close = torch.isclose(got, expected, rtol=2 * torch.finfo(got.dtype).eps, atol=0.0)
        different = ~close.flatten()
        if not different.any():
            return ""
    where = int(different.nonzero()[0])
    got_one, expected_one = got.flatten()[where].item(), expected.flatten()[where].item()
    return f"{int(different.sum())} elements, the first [{where}] = {got_one}, not {expected_one}"
