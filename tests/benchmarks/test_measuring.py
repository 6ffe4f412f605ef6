"""That the benchmark checks what it times, and that it runs."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.allreduce import PRIME, expected_sum, pattern, time_size
from benchmarks.figures import FLOOR, OURS
from benchmarks.plan import QUICK
from tests.worlds import ROOT, end_tree

LIMIT_S = 180.0


class TwoRanks:
    """A communicator in which this is rank 0 of 2, for contenders that need no other rank."""

    rank, size = 0, 2

    def Barrier(self):
        pass


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, PRIME - 1, PRIME, 2 * PRIME + 1])
def test_the_expected_sum_is_that_of_the_patterns(size, count):
    total = sum(pattern(count, rank, size) for rank in range(size))
    assert torch.equal(total, expected_sum(count, size))


def test_a_right_sum_is_timed_once_per_round():
    def adds_the_other_ranks_input(buffer):
        return lambda: buffer.mul_(2).add_(1)  # rank 1's input is rank 0's + 1, shift included

    times_s = time_size(1 << 16, 5, TwoRanks(), {"right": adds_the_other_ranks_input})
    assert len(times_s["right"]) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda buffer: buffer,  # nothing was sent
        lambda buffer: buffer.mul_(2),  # a rank was counted twice
        lambda buffer: buffer.copy_(buffer.mul(2).add(1).roll(1)),  # shifted by one
    ],
)
def test_a_wrong_sum_is_no_result(wrong):
    contenders = {"broken": lambda buffer: lambda: wrong(buffer)}
    with pytest.raises(AssertionError, match="broken: wrong sum of 64 KiB on rank 0"):
        time_size(1 << 16, 5, TwoRanks(), contenders)


def test_one_command_measures_and_writes_everything(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--output", str(tmp_path)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        end_tree(process)
        pytest.fail(f"no end after {LIMIT_S:g} s\n{process.communicate()[0]}")
    assert process.returncode == 0, output

    (run,) = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert run["ranks"] == 2
    assert [row["bytes"] for row in run["allreduce"]] == list(QUICK.sizes_bytes)
    for row in run["allreduce"]:
        assert set(row["median_s"]) == {OURS, "Gloo", "MPI"}
    for row in run["training"]:
        assert set(row["median_s"]) == {OURS, "DDP (Gloo)", "MPI by hand", FLOOR}
    assert (tmp_path / "bench.png").exists()
    assert "Allreduce in place" in output
    assert "Training step" in output
