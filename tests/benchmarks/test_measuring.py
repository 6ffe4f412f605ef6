"""That the benchmark checks what it times, and that it runs."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.allreduce import PRIME, expected_sum, pattern, time_size
from benchmarks.figures import BOUND, FLOOR, OURS
from benchmarks.plan import QUICK
from tests.programs import run_program


class TwoRanks:
    """A communicator in which this is rank 0 of 2, for contenders that need no other rank."""

    rank, size = 0, 2

    def Barrier(self):
        pass


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, PRIME - 1, PRIME, 2 * PRIME + 1])
def test_the_expected_sum_is_that_of_the_patterns(size, count):
    patterns = torch.stack([pattern(count, rank, size) for rank in range(size)])
    assert torch.equal(patterns.sum(dim=0), expected_sum(count, size))


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
    finished = run_program(command, limit_s=180)
    assert finished.code == 0, finished

    (run,) = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert run["ranks"] == 2
    assert [row["bytes"] for row in run["allreduce"]] == list(QUICK.sizes_bytes)
    for row in run["allreduce"]:
        assert set(row["median_s"]) == {OURS, "Gloo", "MPI", BOUND}
    for row in run["training"]:
        assert set(row["median_s"]) == {OURS, "DDP (Gloo)", "MPI by hand", FLOOR}
    assert (tmp_path / "bench.png").exists()
    assert "Allreduce in place" in finished.stdout
    assert "Training step" in finished.stdout


def test_the_latency_of_each_form_is_measured_and_checked():
    hvdrun = str(Path(sys.executable).with_name("hvdrun"))
    command = [hvdrun, "-np", "2", sys.executable, "-m", "benchmarks.latency", "--quick"]
    finished = run_program(command, limit_s=120)
    assert finished.code == 0, finished
    for form in ("first of its name", "in place", "grouped_allreduce of 100", "mpi4py", "Gloo"):
        assert form in finished.stdout, finished
    assert "of an idle rank, by rank: " in finished.stdout
