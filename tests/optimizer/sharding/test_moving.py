"""State moves from its owners to those who want it: all of it to one rank, or to new owners."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.sharding import moving
from hvdlite.optimizer.sharding.cut import Part
from hvdlite.optimizer.sharding.pieces import Whole, part_of_state
from tests.optimizer.sharding import cuts
from tests.optimizer.sharding.test_state_dicts import KINDS, assert_same_state


def gathers(chunk_bytes):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    params = cuts.params_of([(2, 3), (), (5,), (4, 2)], transposed={3})
    wholes = cuts.wholes_of(params)
    params[2].requires_grad_(False)
    full = cuts.trained([p for p in params if p.requires_grad], KINDS["ASGD"]).state_dict()["state"]
    full = {0: full[0], 1: full[1], 3: full[2]}
    pieces = [
        (part, part_of_state(full.get(part.index, {}), wholes[part.index], part.begin, part.end))
        for part in cuts.halves(wholes, size)[rank]
    ]
    moving.CHUNK_BYTES, before = chunk_bytes, moving.CHUNK_BYTES
    found = moving.Move("test", hvd.global_process_set, rank).full_states(wholes, pieces)
    moving.CHUNK_BYTES = before
    assert_same_state(found, full if rank == 0 else {})


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("chunk_bytes", [4, pytest.param(1 << 20, marks=pytest.mark.wide)])
def test_rank_0_gets_the_state_of_one_process(world, chunk_bytes):
    world.run(gathers, chunk_bytes)


def moves(circles):
    """From one cut to another."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    params = cuts.params_of([(2, 3), (), (5,), (4, 2)], transposed={3})
    wholes = cuts.wholes_of(params)
    full = cuts.trained(params, KINDS["Adam"]).state_dict()["state"]
    circle = circles[rank]
    members = [other for other in range(size) if circles[other] == circle]
    own, count = members.index(rank), len(members)

    def states_of(parts):
        return [part_of_state(full[p.index], wholes[p.index], p.begin, p.end) for p in parts]

    before = cuts.halves(wholes, count)[own]
    # The other way round, and the last owner has a parameter whole.
    after = [part for part in cuts.halves(wholes, count)[count - 1 - own] if part.index != 2]
    after += [Part(2, 0, 5)] if own == count - 1 else []
    pieces = list(zip(before, states_of(before), strict=True))
    move = moving.Move("test", hvd.global_process_set, rank, circle)
    found = move.states(wholes, pieces, after)
    assert_same_state(dict(enumerate(found)), dict(enumerate(states_of(after))))
    numbers = [id(state["step"]) for state in found]
    assert len(set(numbers)) == len(after)
    same_again = move.states(wholes, pieces, before)
    assert_same_state(dict(enumerate(same_again)), dict(enumerate(states_of(before))))
    full_again = move.full_states(wholes, pieces)
    assert_same_state(full_again, full if rank == 0 else {})


@pytest.mark.ranks(3)
@pytest.mark.parametrize("circles", [[0, 0, 0], [0, 0, 1]])
def test_state_moves_to_its_new_owners_within_a_circle(world, circles):
    world.run(moves, circles)


def gathers_whole_parameters():
    hvd.init()
    rank = hvd.rank()
    wholes = (Whole("a", (2, 3), (3, 1)), Whole("b", (4,), (1,)))
    states = [
        {"row": torch.arange(2.0), "step": 3, "none": None},
        {"momentum": torch.arange(4.0), "basis": torch.arange(6.0).reshape(2, 3).t()},
    ]
    # The second rank has the first parameter.
    index = 1 - rank
    pieces = [(Part(index, 0, wholes[index].numel), states[index])]
    gather = moving.Move("test", hvd.global_process_set, rank)
    found = gather.full_states(wholes, pieces, dealt_whole=True)
    assert_same_state(found, dict(enumerate(states)) if rank == 0 else {})


@pytest.mark.ranks(2)
def test_parameters_that_are_dealt_whole_come_as_they_are(world):
    world.run(gathers_whole_parameters)


def gathers_what_disagrees():
    hvd.init()
    rank = hvd.rank()
    whole = Whole("w", (4,), (1,))
    part = Part(0, 2 * rank, 2 * rank + 2)
    gather = moving.Move("test", hvd.global_process_set, rank)
    with pytest.raises(ValueError, match=r"'step' of 'w' is 0.0 for .* but 1.0 for 2 to 3"):
        gather.full_states([whole], [(part, {"step": torch.tensor(float(rank))})])
    buffer = {"buffer": torch.ones(2)}
    with pytest.raises(ValueError, match=r"has \['buffer'\] for .* but \[\] for 2 to 3"):
        gather.full_states([whole], [(part, {} if rank else buffer)])
    with pytest.raises(ValueError, match="no given state has the elements 2 to 3 of 'w'"):
        gather.full_states([whole], [] if rank else [(part, buffer)])


@pytest.mark.ranks(2)
def test_states_that_do_not_belong_together_are_an_error_on_every_rank(world):
    world.run(gathers_what_disagrees)
