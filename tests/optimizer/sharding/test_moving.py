"""State moves from its owners to those who want it: all of it to one rank, or to new owners."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.sharding.division import Part
from hvdlite.optimizer.sharding.moving import Move
from hvdlite.optimizer.sharding.pieces import Whole, shaped_state
from tests.optimizer.sharding import cuts
from tests.optimizer.sharding.test_state_dicts import KINDS


def moved(wholes, circle, held, wanted, states):
    """What this rank gets. circle: the ranks that give to each other."""
    own = circle.index(hvd.rank())
    move = Move("test", hvd.global_process_set, circle, own, wholes, held, wanted)
    return move.states(list(zip(held[own], states, strict=True)), wanted[own])


def moves(circle_of, kind):
    """From one cut to another; then all of it to one rank."""
    hvd.init()
    params = cuts.params_of([(2, 3), (), (5,), (4, 2)], transposed={3})
    wholes = cuts.wholes_of(params)
    full = cuts.trained(params[:2] + params[3:], KINDS[kind]).state_dict()["state"]
    full = {0: full[0], 1: full[1], 3: full[2]}
    circle = [rank for rank in range(hvd.size()) if circle_of[rank] == circle_of[hvd.rank()]]
    own, count = circle.index(hvd.rank()), len(circle)
    held = cuts.halves(wholes, count)
    # The other way round, and the last owner has a parameter whole.
    turned = [[part for part in parts if part.index != 3] for parts in held[::-1]]
    turned[-1].append(Part(3, 0, 8))
    states = cuts.states_of(full, held[own], wholes)
    for wanted in (turned, held):
        found = moved(wholes, circle, held, wanted, states)
        expected = cuts.states_of(full, wanted[own], wholes)
        cuts.assert_same_state(dict(enumerate(found)), dict(enumerate(expected)))
        numbers = [id(state["step"]) for state in found if state]
        assert len(set(numbers)) == len(numbers)
    everything = [[Part(i, 0, w.numel) for i, w in enumerate(wholes)], *[[]] * (count - 1)]
    found = moved(wholes, circle, held, everything, states)
    found = {i: shaped_state(state, wholes[i]) for i, state in enumerate(found) if state}
    cuts.assert_same_state(found, full if own == 0 else {})


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["Adam", "ASGD"])
@pytest.mark.parametrize("circle_of", [[0, 0, 0], [0, 0, 1]])
def test_state_moves_to_its_new_owners_within_a_circle(world, circle_of, kind):
    world.run(moves, circle_of, kind)


def moves_whole_parameters():
    hvd.init()
    rank = hvd.rank()
    wholes = (Whole("a", (2, 3), (3, 1)), Whole("b", (4,), (1,)))
    states = [
        {"row": torch.arange(2.0), "step": 3, "none": None},
        {"momentum": torch.arange(4.0), "basis": torch.arange(6.0).reshape(2, 3).t()},
    ]
    # The second rank has the first parameter.
    a, b = Part(0, 0, 6), Part(1, 0, 4)
    found = moved(wholes, [0, 1], ((b,), (a,)), ((a, b), ()), [states[1 - rank]])
    cuts.assert_same_state(dict(enumerate(found)), {} if rank else dict(enumerate(states)))


@pytest.mark.ranks(2)
def test_parameters_that_are_dealt_whole_come_as_they_are(world):
    world.run(moves_whole_parameters)


def disagrees():
    hvd.init()
    rank = hvd.rank()
    wholes = (Whole("w", (4,), (1,)),)
    held = ((Part(0, 0, 2),), (Part(0, 2, 4),))
    wanted = ((Part(0, 0, 4),), ())
    with pytest.raises(ValueError, match=r"'step' of 'w' is 0.0 for .* but 1.0 for 2 to 3"):
        moved(wholes, [0, 1], held, wanted, [{"step": torch.tensor(float(rank))}])
    buffer = {"buffer": torch.ones(2)}
    with pytest.raises(ValueError, match=r"has \['buffer'\] for .* but \[\] for 2 to 3"):
        moved(wholes, [0, 1], held, wanted, [{} if rank else buffer])


@pytest.mark.ranks(2)
def test_states_that_do_not_belong_together_are_an_error_on_every_rank(world):
    world.run(disagrees)
