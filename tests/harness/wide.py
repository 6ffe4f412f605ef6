"""Which tests run where: in `make test`, in `make test-wide`, or in neither.

The variants of a test are the shapes of its world times its other parameters. `make test` runs each
under one MPI; the MPIs take turns. The first variant on several hosts, or of processes that are no
world of the harness, runs under both. `make test-wide` runs what is marked `wide` or `wide_in`, the
large worlds of a test that has smaller ones, and the turns of the other MPI where an MPI can make a
difference: between hosts, and where its processes start and end. Of many wide variants it runs each
shape and each parameter, not all combinations. `--mpi NAME` runs everything under that MPI.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from tests.harness.worlds import MPIS

Shape = int | str | None  # ranks on one host, or a layout such as "2,1"; None: own processes

FEW_RANKS = 3
MANY_VARIANTS = 12
MPI_OF_OTHER_SIZES = "mpich"  # the one that starts faster


@dataclass(frozen=True)
class Variant:
    """One run of a test."""

    mpi: str
    shape: Shape
    others: Hashable = None  # the other parameters
    is_wide: bool = False  # by a mark


def num_ranks(shape: Shape) -> int:
    """
    >>> num_ranks(3), num_ranks("2,1"), num_ranks(None)
    (3, 3, 0)
    """
    return shape if isinstance(shape, int) else sum(map(int, shape.split(","))) if shape else 0


def targets(variants: Sequence[Variant], mpi_matters: bool | None) -> list[str]:
    """For each variant of one test "test", "wide", or "": no target runs it.

    mpi_matters: whether an MPI can make a difference to the test; None: between hosts only.
    """
    shapes = _numbers(sorted((v.shape for v in variants), key=lambda shape: isinstance(shape, int)))
    others = _numbers(variant.others for variant in variants)
    numbers = [shapes[variant.shape] + others[variant.others] for variant in variants]
    mpis = [mpi for mpi in MPIS if any(variant.mpi == mpi for variant in variants)]
    found = [
        _target(variant, number, mpis, {v.shape for v in variants}, mpi_matters)
        for variant, number in zip(variants, numbers, strict=True)
    ]
    # Every so many diagonals of the table of shapes and parameters: they meet each row and column.
    step = max(1, min(found.count("wide") // MANY_VARIANTS, len(shapes), len(others)))
    return [
        "" if target == "wide" and number % step else target
        for target, number in zip(found, numbers, strict=True)
    ]


def _target(
    variant: Variant,
    number: int,
    mpis: Sequence[str],
    shapes: Collection[Shape],
    mpi_matters: bool | None,
) -> str:
    on_one_host, ranks = isinstance(variant.shape, int), num_ranks(variant.shape)
    is_large = ranks > FEW_RANKS
    turn = MPI_OF_OTHER_SIZES if is_large or ranks == 1 else mpis[number % len(mpis)]
    if variant.mpi == turn or len(mpis) == 1:
        smaller = [
            s for s in shapes if isinstance(s, int) == on_one_host and num_ranks(s) <= FEW_RANKS
        ]
        return "wide" if variant.is_wide or (is_large and len(smaller) > 1) else "test"
    if number == 0 and not on_one_host and not variant.is_wide and not is_large:
        return "test"
    matters = not on_one_host if mpi_matters is None else mpi_matters
    return "wide" if matters and not is_large else ""


def _numbers(things: Iterable[Hashable]) -> dict[Hashable, int]:
    """Each distinct thing with its number, in order of first appearance."""
    return {thing: place for place, thing in enumerate(dict.fromkeys(things))}
