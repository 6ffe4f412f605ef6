"""Sums between hosts: each algorithm over MPI."""

import pytest

import hvdlite as hvd
from tests.core import limits, oracles

ALGORITHMS = ("ring", "direct", "recursive_doubling")

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.hosts("1,1", "1,1,1", "2,1,1", "1,3,3"),
    pytest.mark.wide_in("1,1,1", "1,3,3"),
]


def sums_of_every_size(dtype):
    hvd.init()
    wrong = []
    for count in limits.counts("tiny knobs", dtype, hvd.size()):
        given, expected = oracles.case_of(dtype, "Sum", hvd.rank(), hvd.size(), count)
        got = hvd.allreduce(given, op=hvd.Sum, name=f"{count}")
        if problem := oracles.mismatch(got, expected):
            wrong.append(f"{count}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.wide)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_adds_up_everything(world, algorithm, dtype):
    world.run(sums_of_every_size, dtype, knobs={**limits.TINY, "HVDLITE_ALGORITHM": algorithm})
