"""A rank that leaves while others wait for it."""

import re

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from tests.core.matching.test_joined import everyone, plan_of

FORMS = {
    "allreduce": _core.PLAN_WHOLE,
    "reduce to owners": _core.PLAN_TO_OWNERS,
    "unite": _core.PLAN_UNITE,
}


def leaves_with_a_run_under_way():
    """The last rank is not its host's leader, which speaks for it."""
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    tensor = torch.ones(100_000)
    plan = plan_of(tensor, "left behind")
    assert plan.start(tensor).wait() is None
    if rank == 0:
        everyone().recv(source=last)
    operation = plan.start(tensor)
    if rank == last:
        hvd.shutdown()
        everyone().send("has left", 0)
    text = operation.wait()
    hvd.shutdown()
    everyone().Barrier()
    return text


def starts_a_run_that_the_other_host_never_begins(form):
    """The last rank leaves before its neighbour starts the run, and rank 0's host begins it before
    it has heard of that."""
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    tensor = torch.ones(100_000)
    plan = plan_of(tensor, "never begun", form)
    assert plan.start(tensor).wait() is None
    everyone().Barrier()
    if rank == last:
        hvd.shutdown()
    text = None if rank == last else plan.start(tensor).wait()
    hvd.shutdown()
    everyone().Barrier()
    return text


@pytest.mark.ranks
@pytest.mark.hosts("1,2", "2,2")
def test_all_hosts_are_told_which_rank_has_left(world):
    last = world.size - 1
    *texts, own = world.run(leaves_with_a_run_under_way)
    # Unless another host has failed for its sake by then, and told it.
    own_words = f"rank {last} called shutdown before the operation had ended"
    assert own == own_words or re.match(rf"rank {last} on host\d has left while", own), own
    # By then the departure is known, or the missing answers show it.
    assert all(re.match(rf"rank {last} on host\d has left", text) for text in texts), texts


@pytest.mark.ranks
@pytest.mark.hosts("1,2", "2,2", "1,1,2")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_run_that_another_host_never_begins_fails(world, form):
    last = world.size - 1
    for _ in range(5):
        *texts, _ = world.run(starts_a_run_that_the_other_host_never_begins, form)
        assert all(re.match(rf"rank {last} on host\d has left", text) for text in texts), texts
