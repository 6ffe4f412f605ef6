"""What `make test-c10d` calls a defect."""

import json

import pytest

from tests.c10d.__main__ import EXCEPTIONS, NAMES, RANKS, REFERENCE, Run, as_text, learned
from tests.c10d.one_test import FAILED, HUNG, PASSED, SKIPPED, Outcome
from tests.c10d.verdict import defects, read_exceptions


def outcome(status, test="test_x"):
    return Outcome(test, status, 1.0, "the text")


@pytest.mark.parametrize(
    ("status", "must_pass", "excepted", "said"),
    [
        (PASSED, {"test_x"}, {}, ""),
        (PASSED, set(), {}, ""),
        (SKIPPED, set(), {}, ""),
        (SKIPPED, {"test_x"}, {}, "skipped, but it must pass: the text"),
        (FAILED, set(), {}, "failed after 1 s"),
        (HUNG, {"test_x"}, {}, "hung after 1 s"),
        (FAILED, {"test_x"}, {"test_x": "a reason"}, ""),
        (HUNG, set(), {"test_x": "a reason"}, ""),
        (PASSED, {"test_x"}, {"test_x": "a reason"}, "take it out of exceptions.txt"),
    ],
)
def test_a_test_that_gloo_passes_and_we_do_not_is_a_defect(status, must_pass, excepted, said):
    found = defects([outcome(status)], must_pass, excepted)
    assert bool(found) == bool(said)
    assert not said or said in found[0]


def test_a_name_that_torch_no_longer_has_is_a_defect():
    assert defects([], {"test_x"}, {"test_y": "a reason"}) == [
        "test_x: torch has no such test any more",
        "test_y: torch has no such test any more",
    ]


def test_the_reference_learns_what_passes_and_forgets_what_does_not():
    old = {"torch": "1", "needs_gpu": [], "passes": {"gloo": {"test_x": [3, 4], "test_y": [4]}}}
    outcomes = [outcome(FAILED), outcome(PASSED, "test_y"), outcome(PASSED, "test_z")]
    new = learned(old, [Run("gloo", 4, outcomes, 1.0, 0)], "2")
    assert new["passes"] == {"gloo": {"test_x": [3], "test_y": [4], "test_z": [4]}}
    assert json.loads(as_text(new)) == new


def test_the_lists_name_backends_and_ranks_that_are_run():
    reference = json.loads(REFERENCE.read_text())
    assert as_text(reference) == REFERENCE.read_text()
    assert set(reference["passes"]) <= set(NAMES)
    assert {n for tests in reference["passes"].values() for r in tests.values() for n in r} == {
        *RANKS
    }
    for line in read_exceptions(EXCEPTIONS.read_text()):
        assert line.name in NAMES
        assert {*line.ranks} <= {*RANKS}


def test_an_exception_without_a_reason_is_refused():
    with pytest.raises(ValueError, match="not a name, numbers of ranks, a test and a reason"):
        read_exceptions("gloo 3 test_x")
