"""The formulas of the benchmark."""

import doctest

import pytest

from benchmarks import figures, instructions, plan, tail
from benchmarks.figures import (
    BOUND,
    DDP,
    FLOOR,
    OURS,
    algbw,
    busbw,
    joined,
    medians,
    not_hidden,
    of_bound,
    ratio,
    rows_by_place,
    slowest,
    speedups,
)
from benchmarks.plan import Place


@pytest.mark.parametrize("module", [figures, instructions, plan, tail])
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


def test_neither_the_floor_nor_the_bound_is_a_peer():
    assert speedups({OURS: 2.0, "Gloo": 8.0, FLOOR: 1.0, BOUND: 1.0}) == {"Gloo": 4.0}
    assert of_bound({OURS: 2.0, "Gloo": 8.0, BOUND: 1.0}) == 0.5


def test_what_is_not_hidden_is_a_part_of_hvdlites_step():
    assert not_hidden({OURS: 8.0, DDP: 20.0, FLOOR: 6.0}) == 0.25


def test_of_several_runs_times_are_medians_and_each_ratio_is_the_least_within_a_run():
    row = joined(
        64,
        [
            {"median_s": {OURS: 1.0, "Gloo": 9.0, "Open MPI": 2.0, BOUND: 0.5}, "rounds": 7},
            {"median_s": {OURS: 2.0, "Gloo": 10.0, "MPICH": 5.0, BOUND: 0.5}, "rounds": 5},
        ],
    )
    assert row.time_s == {OURS: 1.5, "Gloo": 9.5, "Open MPI": 2.0, "MPICH": 5.0, BOUND: 0.5}
    assert row.speedup == {"Gloo": 5.0, "Open MPI": 2.0, "MPICH": 2.5}
    assert (row.ratio, row.against_mpi, row.of_bound, row.rounds) == (2.0, 2.0, 0.25, 5)


def test_gloo_does_not_count_as_an_mpi():
    row = joined(4, [{"median_s": {OURS: 2.0, "Gloo": 1.0, "MPI": 3.0, BOUND: 1.0}, "rounds": 1}])
    assert (row.ratio, row.against_mpi) == (0.5, 1.5)


def test_runs_are_put_together_by_place_and_size():
    def run(ranks, *sizes, **elsewhere):
        rows = [
            {"bytes": b, "median_s": {OURS: 1.0, "MPI": 2.0, BOUND: 1.0}, "rounds": 1}
            for b in sizes
        ]
        return {"place": {"ranks": ranks, **elsewhere}, "allreduce": rows}

    found = rows_by_place(
        [run(2, 4, 16), run(2, 16), run(4, 4), run(2, 4, hosts=2, rate="1gbit"), run(8)]
    )
    assert {place: [row.size_bytes for row in rows] for place, rows in found.items()} == {
        Place(2): [4, 16],
        Place(4): [4],
        Place(2, 2, "1gbit"): [4],
    }
