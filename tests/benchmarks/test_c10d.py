"""That operations of torch.distributed are checked where they are timed, and that they run."""

import json
import sys

import pytest
import torch

from benchmarks.c10d import OPERATIONS, Shape, Tensors
from benchmarks.figures import FLOOR, GLOO, IDLE, OPTIMIZER, OURS
from benchmarks.plan import TINY
from tests.harness.programs import run_program

SIZE, COUNT, SHIFT = 2, 4096, 3


def made(name, rank):
    """The tensors of a rank before the operation, and what all ranks put in."""
    ranks = [Tensors(OPERATIONS[name], Shape(r, SIZE, COUNT), 1) for r in range(SIZE)]
    for tensors in ranks:
        tensors.write(SHIFT)
    return ranks[rank], [tensors.inputs[0] for tensors in ranks]


def result(name, rank, inputs):
    half = COUNT // 2
    own = slice(rank * half, (rank + 1) * half)
    return {
        "all_gather_into_tensor": lambda: torch.cat(inputs),
        "reduce_scatter_tensor": lambda: (inputs[0] + inputs[1])[own],
        "all_to_all_single": lambda: torch.cat([inputs[0][own], inputs[1][own]]),
        "all_reduce": lambda: inputs[0] + inputs[1],
        "send and recv, there and back": lambda: inputs[1 - rank],
    }[name]()


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("name", OPERATIONS)
def test_only_the_right_result_passes(name, rank):
    tensors, inputs = made(name, rank)
    (found,) = tensors.inputs if name == "all_reduce" else tensors.outputs
    assert not tensors.are_right(SHIFT)  # nothing was sent
    right = result(name, rank, inputs).clone()
    found.copy_(right)
    assert tensors.are_right(SHIFT)
    for wrong in (right.roll(1), right + 1, right + SIZE, 2 * right):
        found.copy_(wrong)
        assert not tensors.are_right(SHIFT)


@pytest.mark.wide
def test_operations_and_steps_are_measured(tmp_path):
    options = ("--plan", "tiny", "--only", "c10d", "--only", "wrapped", "--output", str(tmp_path))
    finished = run_program([sys.executable, "-m", "benchmarks", *options], limit_s=300)
    assert finished.code == 0, finished
    (run,) = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert [row["operation"] for row in run["c10d"]] == [name for name, _ in TINY.c10d]
    assert all({OURS, GLOO} <= {*row["median_s"]} for row in run["c10d"])
    ddp, fsdp2 = run["wrapped"]
    assert {OURS, GLOO, IDLE, OPTIMIZER, FLOOR} <= {*ddp["median_s"]}
    assert {OURS, GLOO, IDLE, FLOOR} <= {*fsdp2["median_s"]}
    assert "Operations of torch.distributed, float32, 2 ranks on one host" in finished.stdout


@pytest.mark.wide
def test_backends_take_turns_in_one_process():
    """The program for GPUs, on CPUs."""
    finished = run_program([sys.executable, "-m", "benchmarks.gpu_c10d", "cpu", "0.1"], 120)
    assert finished.code == 0, finished
    found = json.loads(finished.stdout)
    for kind in (found["ddp"], found["fsdp2"], *found["calls"].values()):
        assert kind["gloo"]["ratio"] == kind["gloo"]["host_ratio"] == 1
        assert 0 < kind["hvdlite"]["host_ms"] <= kind["hvdlite"]["ms"]
