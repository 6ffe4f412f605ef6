"""The figures of timelines whose answers are known."""

from hypothesis import given
from hypothesis import strategies as st

from hvdlite.report.figures import (
    LateRank,
    bandwidths,
    common,
    late_ranks,
    overlaps,
    percentile,
    steps,
    union,
)
from hvdlite.report.trace import match
from tests.report.timelines import operation, span, trace, two_ranks


def test_a_step_is_from_the_latest_end_to_the_latest_end_and_the_first_is_left_out():
    made = steps(two_ranks().spans)
    assert [(step.number, step.begin, step.end) for step in made] == [(2, 1000, 2000)]


def test_the_optimizer_with_most_steps_counts():
    spans = [span(0, "STEP", i, i + 1, i) for i in range(1, 5)]
    other = [span(0, "STEP", 10 * i, 10 * i + 5, i) for i in range(1, 3)]
    for each in other:
        each.optimizer = "other"
    assert [step.us for step in steps(other + spans)] == [1, 1, 1]
    assert steps([]) == []
    assert steps(spans[:1]) == []


def test_the_percentile_is_a_value_that_occurs():
    values = list(range(1, 101))
    assert percentile(values, 0.95) == 95
    assert percentile([7], 0.95) == 7
    assert percentile([1, 2], 0.95) == 2


def test_what_moves_during_backward_is_hidden():
    made = two_ranks()
    found = overlaps(made, steps(made.spans), match(made.operations))
    # Rank 0: 1300-1500 and 1700-1900, of which 1300-1400 is in its backward.
    assert [(each.communication, each.hidden, each.waited) for each in found] == [
        (400, 100, 500),
        (400, 200, 200),
    ]
    assert found[0].share == 0.25


def test_what_waits_for_a_late_rank_of_another_host_does_not_move():
    """A host's ranks may begin with their part before."""
    made = two_ranks()
    early = next(each for each in made.operations if each.rank == 0 and each.name == "b")
    early.matched = early.running = 1400
    found = overlaps(made, steps(made.spans), match(made.operations))
    assert [each.communication for each in found] == [400, 400]
    assert [each.us for each in bandwidths(match(made.operations))] == [200, 200]


def test_the_rank_that_posts_last_is_told_with_what_it_lacks_to_the_one_before():
    made = two_ranks()
    assert late_ranks(made, match(made.operations)) == [
        LateRank(0, 2, 0, 0.0, 0.0, 0),
        LateRank(1, 2, 2, 200.0, 400.0, 0),
    ]


def test_nobody_is_last_by_less_than_the_clocks_can_tell():
    made = two_ranks()
    made.errors = {0: 0.0, 1: 150.0}
    assert late_ranks(made, match(made.operations))[1] == LateRank(1, 2, 1, 300.0, 300.0, 1)


def test_bandwidth_is_told_by_kind_and_size():
    small, large = bandwidths(match(two_ranks().operations))
    assert (small.up_to, small.count, small.us, small.rate) == (1024, 2, 200, 5)
    assert (large.above, large.up_to) == (65536, 262144)
    # 200,000 bytes in 200 us are 1000 MB/s; on a ring of 2 ranks each link carries as much.
    assert (large.rate, large.bus_rate) == (1000, 1000)
    four = trace([operation(r, "x", (0, 0, 0, 10)) for r in range(4)], [], 4)
    assert bandwidths(match(four.operations))[0].bus_rate == 150


def test_operations_are_matched_by_name_in_the_order_of_posting():
    times = [(0, 1, 2, 3), (10, 11, 12, 13)]
    made = [operation(rank, "x", each) for rank in (1, 0) for each in times]
    alone = [operation(0, "only here", (0, 1, 2, 3)), operation(0, "x", (None, 1, 2, 3))]
    matched = match(alone[1:] + made + alone[:1])
    assert [{r: each.posted for r, each in group.items()} for group in matched] == [
        {0: 0, 1: 0},
        {0: 10, 1: 10},
    ]


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(intervals, intervals)
def test_common_time_is_that_of_the_moments_in_both(first, second):
    def moments(of):
        return {at for begin, end in of for at in range(begin, end)}

    assert common(union(first), union(second)) == len(moments(first) & moments(second))
