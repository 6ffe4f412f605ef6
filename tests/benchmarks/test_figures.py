"""The formulas and choices of the benchmark."""

import doctest

import pytest

from benchmarks import figures, plan
from benchmarks.figures import BOUND, FLOOR, OURS, algbw, busbw, medians, of_bound, ratio, slowest


@pytest.mark.parametrize("module", [figures, plan])
def test_the_docstrings_show_what_is_computed(module):
    assert doctest.testmod(module).failed == 0


def test_the_slowest_rank_of_each_round_counts():
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.0]]) == [3.0, 5.0, 2.0]


def test_a_rank_with_a_round_too_few_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        slowest([[1.0, 2.0], [1.0]])


def test_the_median_is_taken_for_each_contender():
    assert medians({"a": [3.0, 1.0, 2.0], "b": [1.0, 2.0]}) == {"a": 2.0, "b": 1.5}


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_is_2_times_n_minus_1_over_n_of_the_algorithms(ranks, factor):
    assert algbw(1000, 0.5) == 2000
    assert busbw(1000, 0.5, ranks) == 2000 * factor


def test_the_ratio_is_that_of_the_best_peer_and_above_1_where_hvdlite_is_faster():
    assert ratio({OURS: 2.0, "Gloo": 8.0, "MPI": 3.0}) == 1.5


def test_the_floor_is_no_peer():
    assert ratio({OURS: 2.0, "Gloo": 8.0, FLOOR: 1.0}) == 4.0


def test_neither_is_the_bound_of_which_hvdlite_reaches_a_part():
    assert ratio({OURS: 2.0, "Gloo": 8.0, BOUND: 1.0}) == 4.0
    assert of_bound({OURS: 2.0, "Gloo": 8.0, BOUND: 1.0}) == 0.5


def test_the_full_plan_goes_from_4_bytes_to_256_mib():
    assert plan.FULL.sizes_bytes[0] == 4
    assert plan.FULL.sizes_bytes[-1] == 256 * 1024 * 1024


@pytest.mark.parametrize("size_bytes", plan.FULL.sizes_bytes)
def test_no_size_is_timed_more_often_than_allowed(size_bytes):
    assert plan.rounds(size_bytes, 7) <= 7
    assert plan.calls(size_bytes) >= 1


def test_every_contender_is_first_as_often_as_the_others():
    firsts = [plan.rotated(["a", "b", "c"], round_)[0] for round_ in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]
