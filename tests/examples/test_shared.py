"""examples/shared.py: data, parameters and state of which each host has one copy."""

import re

import pytest

pytestmark = pytest.mark.wide_in("mpich")


def test_two_ranks_learn_from_one_copy_of_the_data(hvdrun):
    run = hvdrun(2, "shared.py", "--epochs", "3", "--copies", "2", "--expect-accuracy", "85")
    assert run.code == 0, run
    assert "Trained on 2 rank(s)." in run.stdout
    assert "One copy of the data per host: 0.9 MiB" in run.stdout, run
    numel = int(re.search(r"One copy of the parameters per host: (\d+)", run.stdout)[1])
    held = re.search(r"in each rank: (\d+), (\d+) elements", run.stdout).groups()
    assert sum(map(int, held)) == 2 * numel, run
    assert min(map(int, held)) > 0.9 * numel, run
