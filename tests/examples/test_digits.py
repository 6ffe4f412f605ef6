"""examples/digits.py, which is also `make demo`."""

import re

import pytest


def accuracy(run):
    return float(run.find(r"^Test accuracy: (\S+) %$"))


def test_two_ranks_recognise_at_least_97_percent(hvdrun):
    run = hvdrun(2, "digits.py", "--expect-accuracy", "97")
    assert run.code == 0, run
    assert accuracy(run) >= 97
    assert "Trained on 2 rank(s)" in run.stdout


def test_rank_0_alone_shows_a_progress_bar_a_loss_curve_and_what_to_try_next(hvdrun):
    run = hvdrun(2, "digits.py", "--epochs", "1")
    assert run.code == 0, run
    assert len(re.findall(r"\b0/22 \[", run.stderr)) == 1, "one bar begins"
    assert len(re.findall("22/22", run.stderr)) >= 1, "and reaches its end"
    assert run.stdout.count("Training loss") == 1
    assert "█" in run.stdout
    next_steps = run.stdout.partition("What to try next:\n")[2].splitlines()
    assert len(next_steps) == 3, run
    assert ["hvdrun" in step or "script" in step for step in next_steps] == [True] * 3


@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_reach_the_same_accuracy(hvdrun, ranks):
    run = hvdrun(ranks, "digits.py", "--expect-accuracy", "97")
    assert run.code == 0, run


def test_one_process_needs_no_launcher(alone):
    run = alone("digits.py", "--expect-accuracy", "97")
    assert run.code == 0, run
    assert "Trained on 1 rank(s)" in run.stdout


@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_the_exit_code_is_1_where_the_accuracy_is_below_the_expected_one(hvdrun):
    run = hvdrun(2, "digits.py", "--epochs", "1", "--expect-accuracy", "101")
    assert run.code == 1, run
    assert accuracy(run) <= 100
