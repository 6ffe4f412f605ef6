"""Which tests are wide: they repeat a test in another shape of the world or under the other MPI.

`make test` leaves them out to save time; `make test-wide` runs them. The mark `wide` makes a test
or a parameter wide, the mark `wide_in` only in some worlds or under one MPI. A test is also wide in
the largest of several worlds, as many ranks take long to start. And MPIs take turns:

The variants of a test are the shapes of its world times its other parameters. `make test` runs each
of them under one MPI, and the MPIs take turns, so that with two parameters or more each MPI sees
each shape. One variant it runs under every MPI: the first on several hosts, as what is between
them goes through MPI, or the first of processes that are no world of the harness. Where all worlds
are on one host there is none, as data does not go through MPI there. Worlds of one rank and of more
than three are started under one MPI only: a single rank sends nothing, and the many ranks take long
to come up, while the smaller worlds show what an MPI does between ranks and between hosts.

Nor does `make test-wide` run these large worlds under both MPIs (`repeated`): on one host they run
under one MPI, as their data does not go through it, and on several hosts the MPIs take turns once
more. What is above MPI it runs once (`shown_by_the_other`): any variant on one host, and with the
mark `above_mpi`, or in the folders that only use the engine, also on several. `make test` has run
it under one MPI then, or the MPIs take turns. Not so in the folders that test how an MPI's
processes start, meet and end.

Of a test with many wide variants `make test-wide` runs a part (`beyond_cover`): each shape of the
world and each choice of the other parameters, but not each with each. `--mpi` names an MPI that
then runs everything.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from tests.harness.worlds import MPIS

Shape = int | str | None  # ranks on one host, or a layout such as "2,1"

FEW_RANKS = 3
MANY_VARIANTS = 12
MPI_OF_OTHER_SIZES = "mpich"  # the one that starts faster


@dataclass(frozen=True)
class Variant:
    """One run of a test."""

    mpi: str
    shape: Shape
    others: Hashable = None  # the other parameters

    @property
    def on_several_hosts(self) -> bool:
        return isinstance(self.shape, str)


def num_ranks(shape: Shape) -> int:
    """
    >>> num_ranks(3), num_ranks("2,1"), num_ranks(None)
    (3, 3, 0)
    """
    return shape if isinstance(shape, int) else sum(map(int, shape.split(","))) if shape else 0


def slow_to_start(shapes: Collection[Shape]) -> set[Shape]:
    """The large shapes of a test that has several smaller ones of the same kind (on one host, on
    several hosts)."""
    slow: set[Shape] = set()
    for kind in (int, str):
        of_kind = [shape for shape in shapes if isinstance(shape, kind)]
        large = {shape for shape in of_kind if num_ranks(shape) > FEW_RANKS}
        if len(of_kind) - len(large) > 1:
            slow |= large
    return slow


def by_turn(variants: Sequence[Variant]) -> list[bool]:
    """For each variant of one test: whether it is wide, because the other MPI has its turn."""
    if len({variant.mpi for variant in variants}) < 2:
        return [False] * len(variants)
    # Those on several hosts come first.
    shapes = _numbers(v.shape for v in sorted(variants, key=lambda v: not v.on_several_hosts))
    others = _numbers(variant.others for variant in variants)
    numbers = [shapes[variant.shape] + others[variant.others] for variant in variants]
    return [
        variant.mpi != MPI_OF_OTHER_SIZES
        if under_one_mpi(variant.shape)
        else (number > 0 or isinstance(variant.shape, int))
        and (number + MPIS.index(variant.mpi)) % len(MPIS) != 0
        for number, variant in zip(numbers, variants, strict=True)
    ]


def repeated(variants: Sequence[Variant]) -> list[bool]:
    """For each variant of one test: whether it is left out, because the other MPI runs it in the
    same large world, or in that of a single rank, and the test has smaller ones under both."""
    if len({variant.mpi for variant in variants}) < 2:
        return [False] * len(variants)
    shapes = _numbers(variant.shape for variant in variants)
    others = _numbers(variant.others for variant in variants)
    large = slow_to_start({variant.shape for variant in variants}) | (
        {1} if len(shapes) > 1 else set()
    )
    turns = [
        shapes[variant.shape] + others[variant.others] if variant.on_several_hosts else 0
        for variant in variants
    ]
    return [
        variant.shape in large and (turn + (variant.mpi != MPI_OF_OTHER_SIZES)) % len(MPIS) != 0
        for turn, variant in zip(turns, variants, strict=True)
    ]


def shown_by_the_other(
    variants: Sequence[Variant], wide: Sequence[bool], above_mpi: bool
) -> list[bool]:
    """For each variant of one test: whether it is left out, because the other MPI runs the same and
    MPI makes no difference. What is not wide is never left out.

    above_mpi: nor does it make one between hosts, or in a job of hvdrun.
    """
    shapes = _numbers(variant.shape for variant in variants)
    others = _numbers(variant.others for variant in variants)
    runs: dict[tuple[Shape, Hashable], dict[str, bool]] = {}
    for variant, is_wide in zip(variants, wide, strict=True):
        runs.setdefault((variant.shape, variant.others), {})[variant.mpi] = is_wide
    left_out = []
    for variant, is_wide in zip(variants, wide, strict=True):
        same = runs[variant.shape, variant.others]
        makes_no_difference = above_mpi or isinstance(variant.shape, int)
        if not is_wide or not makes_no_difference or len(same) < len(MPIS):
            left_out.append(False)
        elif not all(same.values()):
            left_out.append(True)
        else:
            turn = shapes[variant.shape] + others[variant.others]
            left_out.append((turn + MPIS.index(variant.mpi)) % len(MPIS) != 0)
    return left_out


def beyond_cover(variants: Sequence[Variant], wide: Sequence[bool]) -> list[bool]:
    """For each variant of one test: whether it is left out, because other wide ones have its shape,
    and others its choice of the other parameters. What is not wide is never left out."""
    shapes = _numbers(v.shape for v, is_wide in zip(variants, wide, strict=True) if is_wide)
    others = _numbers(v.others for v, is_wide in zip(variants, wide, strict=True) if is_wide)
    # Of every so many diagonals of the table of shapes and parameters one is kept. It meets each
    # row and each column, if there are as many of both.
    step = min(sum(wide) // MANY_VARIANTS, len(shapes), len(others))
    kept: dict[Hashable, int] = {}
    left_out = [
        is_wide and step > 1 and (shapes[v.shape] + others[v.others]) % step != 0
        for v, is_wide in zip(variants, wide, strict=True)
    ]
    # The table may have gaps, where parameters are not wide in all shapes.
    for place, variant in enumerate(variants):
        if wide[place] and not left_out[place]:
            kept[variant.shape] = kept["others", variant.others] = place
    for place, variant in enumerate(variants):
        lacks = variant.shape not in kept or ("others", variant.others) not in kept
        if left_out[place] and lacks:
            left_out[place] = False
            kept[variant.shape] = kept["others", variant.others] = place
    return left_out


def under_one_mpi(shape: Shape) -> bool:
    """
    >>> [under_one_mpi(shape) for shape in (1, 3, 4, "2,1", "2,2", None)]
    [True, False, True, False, True, False]
    """
    return num_ranks(shape) == 1 or num_ranks(shape) > FEW_RANKS


def _numbers(things: Iterable[Hashable]) -> dict[Hashable, int]:
    """Each distinct thing with its number, in order of first appearance."""
    return {thing: place for place, thing in enumerate(dict.fromkeys(things))}
