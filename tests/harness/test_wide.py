"""The choice of the tests that `make test` leaves to `make test-wide`."""

import itertools

import pytest

from tests.harness.wide import MANY_VARIANTS, Variant, targets
from tests.harness.worlds import MPIS

SHAPES = [2, 3, 7, 1, "1,1", "2,1", "2,2"]
LARGE = [7, "2,2"]


def chosen(shapes, others, mpi_matters=None, mpis=MPIS, is_wide=False):
    variants = [
        Variant(*parts, is_wide) for parts in itertools.product(mpis, shapes, range(others))
    ]
    runs = {"test": [], "wide": [], "": []}
    for variant, target in zip(variants, targets(variants, mpi_matters), strict=True):
        runs[target].append((variant.mpi, variant.shape, variant.others))
    return runs


@pytest.mark.parametrize("parameters", [1, 2, 3, 10])
def test_every_variant_of_a_small_world_runs_once_and_the_first_between_hosts_twice(parameters):
    runs = [run[1:] for run in chosen(SHAPES, parameters)["test"]]
    small = [shape for shape in SHAPES if shape not in LARGE]
    expected = [*itertools.product(small, range(parameters)), ("1,1", 0)]
    assert sorted(runs, key=str) == sorted(expected, key=str)


def test_with_two_parameters_every_mpi_sees_every_small_world_of_several_ranks():
    seen = {(mpi, shape) for mpi, shape, _ in chosen(SHAPES, 2)["test"] if shape != 1}
    assert seen == {*itertools.product(MPIS, [2, 3, "1,1", "2,1"])}


def test_large_worlds_are_wide_where_there_are_smaller_ones():
    assert {shape for _, shape, _ in chosen(SHAPES, 1)["wide"]} >= set(LARGE)
    assert len(chosen([4, "2,2"], 2)["test"]) == 4


@pytest.mark.parametrize(
    ("mpi_matters", "expected"), [(True, {2, 3, "2,1"}), (None, {"2,1"}), (False, set())]
)
def test_the_other_mpi_runs_wide_where_it_can_make_a_difference(mpi_matters, expected):
    runs = chosen([2, 3, "1,1", "2,1"], 1, mpi_matters)
    assert {shape for _, shape, _ in runs["wide"]} == expected
    assert {run[1:] for run in runs["test"]} == {(shape, 0) for shape in (2, 3, "1,1", "2,1")}


def test_with_one_mpi_or_a_mark_nothing_is_left_out():
    assert len(chosen([2, 3, "1,1"], 2, mpis=MPIS[:1])["test"]) == 6
    assert len(chosen([2, 3], 2, is_wide=True)["wide"]) == 4


@pytest.mark.parametrize("parameters", [12, 40])
def test_of_many_wide_variants_each_shape_and_each_parameter_runs(parameters):
    runs = chosen(SHAPES, parameters, mpis=MPIS[:1], is_wide=True)["wide"]
    assert {run[1] for run in runs} == set(SHAPES)
    assert {run[2] for run in runs} == set(range(parameters))
    assert MANY_VARIANTS <= len(runs) <= 3 * MANY_VARIANTS + parameters
