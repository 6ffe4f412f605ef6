"""The cost model: it finds the parameters that times were made from, and the limits follow."""

from pathlib import Path

import pytest

from benchmarks import cost
from benchmarks.plan import KIB, MIB

MADE = cost.Parameters(20e-6, 3e-6, 1e-9, 1e-10)
SIZES = [4**k for k in range(4, 13)]


def made(hosts):
    return {
        name: {size: cost.seconds(of(hosts, size), MADE) for size in SIZES}
        for name, of in cost.ALLREDUCES.items()
    }


@pytest.mark.parametrize("hosts", [2, 5, 16])
def test_the_parameters_are_found_from_times_that_follow_the_model(hosts):
    found = cost.fitted(hosts, made(hosts), MADE.gamma_s, MADE.overhead_s)
    assert found.alpha_s == pytest.approx(MADE.alpha_s)
    assert found.beta_s == pytest.approx(MADE.beta_s)


def test_few_messages_are_best_for_small_slices_and_few_bytes_for_large_ones():
    assert [cost.best(16, size, MADE) for size in (256, MIB)] == ["recursive_doubling", "direct"]
    names = [name for _, name in cost.limits(16, MADE)]
    assert names == ["recursive_doubling", "direct"]
    assert cost.limits(16, MADE)[-1][0] is None


def test_rails_share_a_link():
    terms = cost.ring(4, 256 * KIB)
    twice = cost.seconds(terms, MADE, rails=2) - cost.seconds(terms, MADE)
    assert twice == pytest.approx(terms[2] * MADE.beta_s)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "cost.md"


def test_the_page_has_the_table_of_sharded_training():
    assert cost.sharded_training() in PAGE.read_text()


def test_sharding_divides_the_state_and_sharing_the_parameters_too():
    one, n = cost.Job(1, 1, 1000), 1000
    assert cost.memory_bytes(one, cost.UNSHARDED, False) == 4 * n  # of one process with Adam
    job = cost.Job(hosts=2, local_size=4, parameter_bytes=n)
    of_rank = {
        (sharding, shared): cost.memory_bytes(job, sharding, shared)
        for sharding in cost.SHARDINGS
        for shared in (False, True)
    }
    assert of_rank == {
        (cost.UNSHARDED, False): 4 * n,
        (cost.UNSHARDED, True): n / 4 + n + 2 * n / 4,
        (cost.SHARDED_ON_HOST, False): 2 * n + 2 * n / 4,
        (cost.SHARDED_ON_HOST, True): n / 4 + n + 2 * n / 4,
        (cost.SHARDED, False): 2 * n + 2 * n / 8,
        (cost.SHARDED, True): n / 4 + n + 2 * n / 8,
    }
