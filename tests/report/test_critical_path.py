"""The critical path of steps whose path is known."""

import itertools
import random

import pytest

from hvdlite.report.critical_path import Paths, Segment, Share, shares
from hvdlite.report.figures import steps
from hvdlite.report.trace import match
from tests.report.timelines import operation, span, trace, two_ranks


def paths_of(made):
    paths = Paths(made.spans, match(made.operations))
    return [paths.of(step) for step in steps(made.spans)]


def test_it_goes_along_the_late_rank_and_the_operation_that_it_posts_last():
    (path,) = paths_of(two_ranks())
    assert path == [
        Segment(1, "", 1000, 1700),
        Segment(1, "allreduce b", 1700, 1900),
        Segment(1, "", 1900, 2000),
    ]


def test_it_goes_from_one_rank_to_another():
    """`a` waits for rank 0, and `b` for rank 1, which goes on only after `a`."""
    spans = [span(rank, "STEP", 100 * i, 100 * i + 100, i + 1) for rank in (0, 1) for i in (0, 1)]
    spans += [span(0, "WAIT", 130, 140), span(1, "WAIT", 110, 140)]
    spans += [span(0, "WAIT", 145, 190), span(1, "WAIT", 170, 190)]
    operations = [
        operation(0, "a", (130, 130, 130, 140)),
        operation(1, "a", (110, 130, 130, 140)),
        operation(0, "b", (145, 170, 170, 190)),
        operation(1, "b", (170, 170, 170, 190)),
    ]
    (path,) = paths_of(trace(operations, spans))
    assert [(each.rank, each.operation, each.us) for each in path] == [
        (0, "", 30),
        (1, "allreduce a", 10),
        (1, "", 30),
        (1, "allreduce b", 20),
        (1, "", 10),
    ]
    assert shares([path]) == [
        Share(1, "", 40, 1),
        Share(0, "", 30, 1),
        Share(None, "allreduce b", 20, 1),
        Share(None, "allreduce a", 10, 1),
    ]


def test_hidden_communication_is_not_on_it():
    spans = [span(0, "STEP", 0, 100, 1), span(0, "STEP", 100, 200, 2), span(0, "WAIT", 180, 181)]
    (path,) = paths_of(trace([operation(0, "a", (110, 110, 110, 150))], spans, 1))
    assert path == [Segment(0, "", 100, 200)]


def test_an_operation_of_the_step_before_is_on_it_from_the_steps_beginning():
    spans = [span(0, "STEP", 0, 100, 1), span(0, "STEP", 100, 200, 2), span(0, "WAIT", 110, 160)]
    (path,) = paths_of(trace([operation(0, "a", (50, 60, 70, 160))], spans, 1))
    assert [(each.operation, each.us) for each in path] == [("allreduce a", 60), ("", 40)]


@pytest.mark.parametrize("seed", range(20))
def test_it_has_no_gaps_whatever_the_clocks_say(seed):
    random.seed(seed)
    ranks, spans, operations = 3, [], []
    for rank in range(ranks):
        at = 0.0
        for number in range(1, 6):
            begin = at
            for i in range(3):
                posted = at + random.uniform(0, 30)
                done = posted + random.uniform(1, 40)
                operations.append(operation(rank, f"{i}", (posted, posted, posted, done)))
                at = done + random.uniform(-5, 5)
                spans.append(span(rank, "WAIT", posted, max(posted, at)))
            at += 3
            spans.append(span(rank, "STEP", begin, at, number))
    made = trace(operations, spans, ranks)
    found = steps(made.spans)
    assert found
    for step, path in zip(found, paths_of(made), strict=True):
        assert path[0].begin == step.begin
        assert path[-1].end == step.end
        assert all(a.end == b.begin for a, b in itertools.pairwise(path))
        assert sum(each.us for each in path) == pytest.approx(step.us)
