"""The choice of the tests that `make test` leaves to `make test-wide`."""

import itertools

import pytest

from tests.conftest import mark_wide
from tests.harness.wide import (
    MANY_VARIANTS,
    Variant,
    beyond_cover,
    by_turn,
    repeated,
    shown_by_the_other,
    slow_to_start,
)
from tests.harness.worlds import MPIS

pytest_plugins = ["pytester"]

ONE_HOST = [2, 3, 7, 1]
SEVERAL = ["1,1", "2,2", "2,1,1"]


def kept(shapes, others, mpis=MPIS):
    variants = [Variant(*parts) for parts in itertools.product(mpis, shapes, others)]
    return [v for v, wide in zip(variants, by_turn(variants), strict=True) if not wide]


@pytest.mark.parametrize("parameters", [1, 2, 3, 10])
@pytest.mark.parametrize(
    ("shapes", "first"),
    [
        (SEVERAL, "1,1"),
        (ONE_HOST + SEVERAL, "1,1"),
        ([None], None),
    ],
)
def test_every_variant_is_run_once_and_the_first_under_every_mpi(shapes, first, parameters):
    runs = kept(shapes, range(parameters))
    variants = [(run.shape, run.others) for run in runs]
    expected = [*itertools.product(shapes, range(parameters)), (first, 0)]
    assert sorted(variants, key=str) == sorted(expected, key=str)
    assert {run.mpi for run in runs if (run.shape, run.others) == (first, 0)} == set(MPIS)


@pytest.mark.parametrize("parameters", [1, 2, 3])
@pytest.mark.parametrize("shapes", [ONE_HOST, [3]])
def test_on_one_host_every_variant_is_run_under_one_mpi(shapes, parameters):
    runs = kept(shapes, range(parameters))
    variants = [(run.shape, run.others) for run in runs]
    assert sorted(variants) == sorted(itertools.product(shapes, range(parameters)))


def test_with_two_parameters_every_mpi_sees_every_shape_of_two_or_three_ranks():
    runs = kept(ONE_HOST + SEVERAL, ["a", "b"])
    seen = {(run.mpi, run.shape) for run in runs}
    few, others = [2, 3, "1,1"], [7, 1, "2,2", "2,1,1"]
    assert seen == {*itertools.product(MPIS, few), *itertools.product(["mpich"], others)}


def test_where_all_worlds_are_large_each_variant_is_run_under_one_mpi():
    runs = kept([4, "2,2"], ["a", "b"])
    assert {run.mpi for run in runs} == {"mpich"}
    assert len(runs) == 4


def test_nothing_is_wide_where_there_is_one_mpi():
    assert len(kept(ONE_HOST, ["a", "b"], MPIS[1:])) == 2 * len(ONE_HOST)


COLLECTED = """
import pytest

@pytest.fixture(params=["openmpi", "mpich"])
def python(request):
    return request.param

@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("abort", 7), ("kill", 137)])
@pytest.mark.parametrize("host", ["a", "b", pytest.param("c", marks=pytest.mark.wide)])
def test_ends(python, end, code, host):
    pass

@pytest.mark.wide_in("mpich")
def test_examples(python):
    pass

def test_without_an_mpi():
    pass
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnknownMarkWarning")
def test_what_pytest_collects_is_marked(pytester):
    pytester.makepyfile(COLLECTED)
    items, _ = pytester.inline_genitems("-p", "no:cacheprovider")
    mark_wide(items)
    names = {item.name for item in items if not item.get_closest_marker("wide")}
    assert names == {
        *("test_ends[openmpi-a-exit-3]", "test_ends[mpich-a-exit-3]"),
        *("test_ends[mpich-a-abort-7]", "test_ends[openmpi-a-kill-137]"),
        *(
            "test_ends[mpich-b-exit-3]",
            "test_ends[openmpi-b-abort-7]",
            "test_ends[mpich-b-kill-137]",
        ),
        *("test_examples[openmpi]", "test_without_an_mpi"),
    }


@pytest.mark.parametrize(
    ("shapes", "slow"),
    [
        ({1, 2, 3, 4, 7, "2,1", None}, {4, 7}),
        ({2, 3}, set()),
        ({4, "2,1"}, set()),  # there are no smaller ones
        ({2, 4}, set()),
        ({2, 3, "1,1", "2,1", "2,2", "1,3,3"}, {"2,2", "1,3,3"}),
        ({2, 3, "2,2", "2,1"}, set()),
    ],
)
def test_the_largest_of_several_worlds_are_wide(shapes, slow):
    assert slow_to_start(shapes) == slow


LARGE = [4, 7, 1, "2,2", "2,1,1"]
SMALL = [2, 3, "1,1", "2,1"]


def run_anywhere(shapes, others, mpis=MPIS):
    variants = [Variant(*parts) for parts in itertools.product(mpis, shapes, others)]
    return [v for v, left in zip(variants, repeated(variants), strict=True) if not left]


@pytest.mark.parametrize("parameters", [1, 2, 5])
def test_small_worlds_run_under_both_mpis_and_large_ones_under_one(parameters):
    runs = run_anywhere(SMALL + LARGE, range(parameters))
    small = itertools.product(MPIS, SMALL, range(parameters))
    assert {(v.mpi, v.shape, v.others) for v in runs if v.shape in SMALL} == {*small}
    large = [(v.shape, v.others) for v in runs if v.shape in LARGE]
    assert sorted(large, key=str) == sorted(itertools.product(LARGE, range(parameters)), key=str)
    assert {v.mpi for v in runs if v.shape in (4, 7, 1)} == {"mpich"}


def test_with_two_parameters_every_mpi_runs_large_worlds_on_several_hosts():
    runs = run_anywhere(SMALL + LARGE, ["a", "b"])
    seen = {(v.mpi, v.shape) for v in runs if v.shape in ("2,2", "2,1,1")}
    assert seen == {*itertools.product(MPIS, ["2,2", "2,1,1"])}


@pytest.mark.parametrize("shapes", [[4], ["2,2", "2,1,1"], [1], [2, 4], [None]])
def test_a_test_without_several_smaller_worlds_runs_in_all_under_both(shapes):
    assert len(run_anywhere(shapes, ["a", "b"])) == len(shapes) * 4


def test_nothing_is_left_out_where_there_is_one_mpi():
    assert len(run_anywhere(SMALL + LARGE, ["a"], MPIS[:1])) == len(SMALL + LARGE)


@pytest.mark.parametrize("above_mpi", [False, True])
@pytest.mark.parametrize("parameters", [1, 2, 5])
def test_what_is_above_mpi_runs_once_in_both_targets_together(parameters, above_mpi):
    variants = [Variant(*p) for p in itertools.product(MPIS, SMALL, range(parameters))]
    wide = by_turn(variants)
    left_out = shown_by_the_other(variants, wide, above_mpi)
    assert not any(out and not is_wide for out, is_wide in zip(left_out, wide, strict=True))
    runs = [variant for variant, out in zip(variants, left_out, strict=True) if not out]
    where = [(v.shape, v.others) for v in runs if above_mpi or not v.on_several_hosts]
    first = [("1,1", 0)] if above_mpi else []  # make test runs it under both
    shapes = SMALL if above_mpi else [2, 3]
    expected = [*itertools.product(shapes, range(parameters)), *first]
    assert sorted(where, key=str) == sorted(expected, key=str)
    if not above_mpi:
        between = itertools.product(MPIS, ["1,1", "2,1"], range(parameters))
        assert {(v.mpi, v.shape, v.others) for v in runs if v.on_several_hosts} == {*between}


def test_where_all_is_wide_the_mpis_take_turns():
    variants = [Variant(*p) for p in itertools.product(MPIS, [2, 3], ["a", "b"])]
    left_out = shown_by_the_other(variants, [True] * len(variants), False)
    runs = [variant for variant, out in zip(variants, left_out, strict=True) if not out]
    assert {(v.shape, v.others) for v in runs} == {*itertools.product([2, 3], ["a", "b"])}
    assert len(runs) == 4
    assert {(v.mpi, v.shape) for v in runs} == {*itertools.product(MPIS, [2, 3])}


def test_what_runs_under_one_mpi_only_is_not_left_out():
    variants = [Variant("openmpi", shape) for shape in SMALL]
    assert not any(shown_by_the_other(variants, [True] * len(variants), True))


def covered(variants, wide):
    left = [v for v, out in zip(variants, beyond_cover(variants, wide), strict=True) if not out]
    return left, [v for v, is_wide in zip(variants, wide, strict=True) if is_wide and v in left]


@pytest.mark.parametrize("shapes", [[2], [2, 3], ONE_HOST + SEVERAL])
@pytest.mark.parametrize("parameters", [1, 3, 12, 40])
@pytest.mark.parametrize("gaps", [0, 3, 5])
def test_of_many_wide_variants_each_shape_and_each_choice_is_run(shapes, parameters, gaps):
    variants = [Variant("mpich", *parts) for parts in itertools.product(shapes, range(parameters))]
    variants = [v for n, v in enumerate(variants) if not gaps or n % gaps]
    if not variants:
        return
    _, runs = covered(variants, [True] * len(variants))
    assert {run.shape for run in runs} == {v.shape for v in variants}
    assert {run.others for run in runs} == {v.others for v in variants}
    assert len(runs) >= min(len(variants), MANY_VARIANTS)
    table = len({v.shape for v in variants}), len({v.others for v in variants})
    assert len(runs) <= max(2 * MANY_VARIANTS, sum(table))


def test_of_few_wide_variants_all_are_run_and_what_is_not_wide_always():
    variants = [Variant("mpich", *parts) for parts in itertools.product([2, 3], range(30))]
    wide = [v.others < MANY_VARIANTS for v in variants]
    left, runs = covered(variants, wide)
    assert [v for v in variants if v.others >= MANY_VARIANTS] == [
        v for v in left if v.others >= MANY_VARIANTS
    ]
    assert len(runs) == MANY_VARIANTS
    few = variants[: 2 * MANY_VARIANTS - 1]
    assert covered(few, [True] * len(few))[0] == few
