"""examples/char_gpt.py: a training ended from outside goes on as if nothing had happened."""

import importlib
import math
import re
import shutil

import pytest
import torch

from tests.examples.checkpoints import last_step, load, trained
from tests.examples.conftest import EXAMPLES

STEPS = 80
SMALL = [
    *("--steps", str(STEPS), "--batch-size", "24", "--warmup-steps", "10", "--log-every", "5"),
    *("--context", "32", "--layers", "1", "--width", "32"),
]
# An untrained model's, ln 103, is 4.6.
LEARNED = 3.1

pytestmark = pytest.mark.wide_in("mpich")


def loss_per_character(run):
    return float(run.find(r"^Test loss per character: (\S+)$"))


def losses(run):
    found = re.findall(r"^Step \d+/\d+: training loss (\S+)$", run.stdout, re.MULTILINE)
    return [float(loss) for loss in found]


@pytest.fixture(scope="module")
def whole(hvdrun, tmp_path_factory):
    """On two ranks, from the beginning to the end."""
    folder = tmp_path_factory.mktemp("whole")
    run = hvdrun(2, "char_gpt.py", *SMALL, "--checkpoints", str(folder))
    assert run.code == 0, run
    return run, folder


@pytest.fixture(scope="module")
def ended(preempted, tmp_path_factory):
    """The same, ended by TERM after some steps."""
    folder = tmp_path_factory.mktemp("ended")
    run = preempted("Step 5/", 2, "char_gpt.py", *SMALL, "--checkpoints", str(folder))
    step = last_step(folder)
    assert f"Ended from outside: saved after step {step}; " in run.stdout, run
    assert 5 <= step < STEPS
    assert run.code == 143, run
    return run, folder


def test_two_ranks_learn_to_write(whole):
    run, folder = whole
    assert len(losses(run)) == STEPS / 5
    assert loss_per_character(run) < LEARNED, run
    assert last_step(folder) == STEPS


def test_ended_and_started_again_equals_uninterrupted_bit_for_bit(hvdrun, whole, ended, tmp_path):
    shutil.copytree(ended[1], tmp_path, dirs_exist_ok=True)
    run = hvdrun(2, "char_gpt.py", *SMALL, "--checkpoints", str(tmp_path))
    assert run.code == 0, run
    assert trained(tmp_path) == trained(whole[1])
    assert loss_per_character(run) == loss_per_character(whole[0])
    assert len(losses(run)) < STEPS / 5


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 4, 9])
def test_a_warm_up_may_be_as_long_as_the_training_or_longer(monkeypatch, warmup_steps):
    monkeypatch.syspath_prepend(EXAMPLES)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    make = importlib.import_module("char_gpt").make_scheduler
    scheduler = make(optimizer, steps=4, warmup_steps=warmup_steps)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    expected = [
        step / warmup_steps
        if step < warmup_steps
        else (1 + math.cos(math.pi * (step - warmup_steps) / (4 - warmup_steps))) / 2
        for step in range(4)
    ]
    assert rates == pytest.approx(expected, rel=1e-14)


@pytest.mark.wide
def test_it_goes_on_with_another_number_of_ranks(hvdrun, whole, ended, tmp_path):
    shutil.copytree(ended[1], tmp_path, dirs_exist_ok=True)
    run = hvdrun(3, "char_gpt.py", *SMALL, "--checkpoints", str(tmp_path))
    assert run.code == 0, run
    assert last_step(tmp_path) == STEPS
    # The same texts in each step, other sums of bfloat16 numbers.
    assert loss_per_character(run) == pytest.approx(loss_per_character(whole[0]), abs=0.02)


@pytest.mark.wide
def test_the_gradient_is_that_of_one_process_although_texts_differ_in_length(
    hvdrun, alone, tmp_path
):
    # After one step Adam's first moment is a tenth of the gradient.
    step = [*SMALL, "--dtype", "float32", "--steps", "1"]
    two = hvdrun(2, "char_gpt.py", *step, "--checkpoints", str(tmp_path / "two"))
    one = alone("char_gpt.py", *step, "--checkpoints", str(tmp_path / "one"))
    assert one.code == two.code == 0, (one, two)
    found, expected = (
        torch.cat([state["exp_avg"].flatten() for state in states.values()])
        for states in (load(tmp_path / name)["optimizer"]["state"] for name in ("two", "one"))
    )
    assert (found - expected).norm() < 1e-5 * expected.norm()
