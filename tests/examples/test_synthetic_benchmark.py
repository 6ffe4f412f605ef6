"""examples/synthetic_benchmark.py. No time is asserted: only that the figures fit together."""

import re

import pytest

FEW = ["--num-iters", "3", "--num-batches-per-iter", "2", "--num-warmup-batches", "1"]


def check(run, ranks, iterations):
    assert run.code == 0, run
    rates = [
        float(rate) for rate in re.findall(r"^Iteration \d+: (\S+) s", run.stdout, re.MULTILINE)
    ]
    assert len(rates) == iterations
    mean = float(run.find(r"^Samples/s per rank: (\S+) \+- \S+$"))
    assert mean == pytest.approx(sum(rates) / iterations, rel=0.01)
    total = float(run.find(rf"^Total samples/s on {ranks} rank\(s\): (\S+) \+- \S+$"))
    assert total == pytest.approx(ranks * mean, rel=0.01)


@pytest.mark.wide
def test_it_counts_the_samples_of_a_resnet_on_two_ranks(hvdrun):
    arguments = ["--model", "resnet", "--batch-size", "4", "--fp16-allreduce", "--no-cuda", *FEW]
    run = hvdrun(2, "synthetic_benchmark.py", *arguments)
    check(run, ranks=2, iterations=3)


def test_it_counts_the_samples_of_an_mlp_in_one_process(alone):
    run = alone("synthetic_benchmark.py", "--model", "mlp", "--no-cuda", *FEW)
    check(run, ranks=1, iterations=3)
