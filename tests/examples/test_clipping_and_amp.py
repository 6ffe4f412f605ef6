"""examples/clipping_and_amp.py"""

import re

import pytest


def accuracy(run):
    return float(run.find(r"^Test accuracy in \w+: (\S+) %$"))


@pytest.mark.wide
def test_float16_with_a_grad_scaler_trains_on_two_ranks(hvdrun):
    run = hvdrun(2, "clipping_and_amp.py", "--dtype", "float16")
    assert run.code == 0, run
    assert accuracy(run) >= 95
    scales = [float(scale) for scale in re.findall(r"loss scale (\d+)$", run.stdout, re.MULTILINE)]
    assert scales[-1] < 65536, "a step overflowed, was skipped, and the scale was lowered"


@pytest.mark.wide
def test_bfloat16_trains_in_one_process(alone):
    run = alone("clipping_and_amp.py", "--dtype", "bfloat16")
    assert run.code == 0, run
    assert accuracy(run) >= 95
