"""examples/digits.py, which is also `make demo`."""

import re

import pytest

pytestmark = pytest.mark.wide_in("mpich")


def accuracy(run):
    return float(run.find(r"^Test accuracy: (\S+) %$"))


@pytest.fixture(scope="module")
def on_two_ranks(hvdrun):
    """What a user sees of it; run once for each MPI."""
    run = hvdrun(2, "digits.py", "--expect-accuracy", "97")
    assert run.code == 0, run
    return run


def test_two_ranks_recognise_at_least_97_percent(on_two_ranks):
    assert accuracy(on_two_ranks) >= 97
    assert "Trained on 2 rank(s)" in on_two_ranks.stdout


def test_rank_0_alone_shows_a_progress_bar(on_two_ranks):
    # Not a terminal: of a bar that moves fast its last state is shown.
    assert len(re.findall(r"100%\|.* 440/440 ", on_two_ranks.stderr)) == 1, on_two_ranks
    assert "[1]" not in on_two_ranks.stderr


def test_the_loss_curve_is_drawn_in_the_terminal(on_two_ranks):
    _, found, curve = on_two_ranks.stdout.partition("Training loss, 20 epochs\n")
    assert found
    rows = curve.partition("└")[0].splitlines()
    assert len(rows) == 9
    assert all(re.search("┤[▁▂▃▄▅▆▇█]", row) for row in rows[:-1]), on_two_ranks


def test_it_ends_with_three_lines_of_what_to_try_next(on_two_ranks):
    _, _, rest = on_two_ranks.stdout.partition("What to try next:\n")
    assert [line.strip().partition("  ")[0] for line in rest.splitlines()] == [
        "more ranks",
        "several hosts",
        "your own script",
    ]


@pytest.mark.wide
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_reach_the_same_accuracy(hvdrun, ranks):
    run = hvdrun(ranks, "digits.py", "--expect-accuracy", "97")
    assert run.code == 0, run


@pytest.mark.wide
def test_one_process_reaches_it_too(alone):
    run = alone("digits.py", "--expect-accuracy", "97")
    assert run.code == 0, run


@pytest.fixture(scope="module")
def one_epoch_alone(alone):
    return alone("digits.py", "--epochs", "1", "--expect-accuracy", "101")


@pytest.mark.wide
def test_one_process_needs_no_launcher(one_epoch_alone):
    assert "Trained on 1 rank(s)" in one_epoch_alone.stdout, one_epoch_alone


def test_the_exit_code_is_1_where_the_accuracy_is_below_the_expected_one(one_epoch_alone):
    assert one_epoch_alone.code == 1, one_epoch_alone
    assert accuracy(one_epoch_alone) <= 100
