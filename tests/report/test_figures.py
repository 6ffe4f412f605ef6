"""The figures of timelines whose answers are known."""

from hvdlite.report.figures import LateRank, late_ranks, percentile, steps
from hvdlite.report.trace import match
from tests.report.timelines import operation, span, two_ranks


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


def test_operations_are_matched_by_name_in_the_order_of_posting():
    made = [operation(rank, "x", at, at + 3) for rank in (1, 0) for at in (0, 10)]
    alone = [operation(0, "only here", 0, 3), operation(0, "x", None, 3)]
    matched = match(alone[1:] + made + alone[:1])
    assert [{r: each.posted for r, each in group.items()} for group in matched] == [
        {0: 0, 1: 0},
        {0: 10, 1: 10},
    ]
