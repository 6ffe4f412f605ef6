"""Programs that once went wrong, found at random and shrunk; each says what it was about."""

import pytest

from tests.properties.calls import Allreduce, BroadcastObject, Join, Tensor
from tests.properties.check import check
from tests.properties.programs import Program, Step, Turn
from tests.properties.test_programs import KNOBS

TWICE = 2  # a second time with an engine that has seen it


def plays(world, *steps):
    """With the default knobs and with the tiny ones."""
    for knobs in ("default knobs", "tiny knobs"):
        for _ in range(TWICE):
            check(world, Program(world.size, steps), KNOBS[knobs])


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
def test_a_root_that_has_joined_fails_a_tiny_broadcast_between_hosts_and_no_rank_dies(world):
    plays(world, Step(BroadcastObject()), Join((0, 1, 1)))


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_a_group_is_the_same_where_one_rank_has_a_tensor_with_gaps_in_it(world):
    two = Allreduce((Tensor("float64", (4, 2)), Tensor("float64", (9,))), grouped=True)
    plays(world, Step(two, "b", turns={1: Turn(strided=True)}))
    plays(world, Step(two, turns={0: Turn("async", strided=True)}))


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize("at", [(0, 1, 1), (0, 0, 1)])
def test_ranks_that_have_joined_scale_their_slices_of_an_adasum(world, at):
    tensors = (Tensor("float64", (33,)),)
    plays(world, Step(Allreduce(tensors, "Adasum", 2.0, -1.0)), Join(at))
