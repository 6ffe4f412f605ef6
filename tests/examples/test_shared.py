"""examples/shared.py: data, parameters and state of which each host has one copy."""

import re
import runpy

import pytest

from tests.examples.conftest import EXAMPLES

ARGUMENTS = ("--epochs", "3", "--copies", "2", "--expect-accuracy", "85")


def check(run):
    """On two ranks, each of which has half of the state."""
    assert run.code == 0, run
    assert "Trained on 2 rank(s)." in run.stdout
    assert "One copy of the data per host: 0.9 MiB" in run.stdout, run
    numel = int(re.search(r"One copy of the parameters per host: (\d+)", run.stdout)[1])
    held = re.search(r"in each rank: (\d+), (\d+) elements", run.stdout).groups()
    assert sum(map(int, held)) == 2 * numel, run
    assert min(map(int, held)) > 0.9 * numel, run


def test_two_ranks_learn_from_one_copy_of_the_data(hvdrun):
    check(hvdrun(2, "shared.py", *ARGUMENTS))


@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--copies"])
def test_a_number_below_one_is_an_error_of_usage(monkeypatch, capsys, option):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("sys.argv", ["shared.py", option, "0"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "shared.py"), run_name="__main__")
    assert "--epochs, --batch-size and --copies must be at least 1" in capsys.readouterr().err
