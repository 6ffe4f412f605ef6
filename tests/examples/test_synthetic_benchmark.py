"""examples/synthetic_benchmark.py. No time is asserted: only that the figures fit together."""

import re

import pytest

FEW = ["--num-iters", "3", "--num-batches-per-iter", "2", "--num-warmup-batches", "1"]


def check(stdout, ranks, iterations):
    rates = [float(rate) for rate in re.findall(r"^Iteration \d+: (\S+) s", stdout, re.MULTILINE)]
    assert len(rates) == iterations
    mean = float(re.search(r"^Samples/s per rank: (\S+) \+- \S+$", stdout, re.MULTILINE)[1])
    assert mean == pytest.approx(sum(rates) / iterations, rel=0.01)
    pattern = rf"^Total samples/s on {ranks} rank\(s\): (\S+) \+- \S+$"
    assert float(re.search(pattern, stdout, re.MULTILINE)[1]) == pytest.approx(
        ranks * mean, rel=0.01
    )


def test_it_counts_the_samples_of_a_resnet_on_two_ranks(hvdrun):
    arguments = ["--model", "resnet", "--batch-size", "4", "--fp16-allreduce", "--no-cuda", *FEW]
    run = hvdrun(2, "synthetic_benchmark.py", *arguments)
    assert run.code == 0, run
    check(run.stdout, ranks=2, iterations=3)


def test_it_counts_the_samples_of_an_mlp_in_one_process(alone):
    run = alone("synthetic_benchmark.py", "--model", "mlp", "--no-cuda", *FEW)
    assert run.code == 0, run
    check(run.stdout, ranks=1, iterations=3)
