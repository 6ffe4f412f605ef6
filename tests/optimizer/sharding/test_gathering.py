"""The state of all owners on one rank, one tensor after the other."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.sharding import gathering
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
    gathering.CHUNK_BYTES, before = chunk_bytes, gathering.CHUNK_BYTES
    found = gathering.Gathering("test", hvd.global_process_set, rank).full_states(wholes, pieces)
    gathering.CHUNK_BYTES = before
    assert_same_state(found, full if rank == 0 else {})


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("chunk_bytes", [4, pytest.param(1 << 20, marks=pytest.mark.wide)])
def test_rank_0_gets_the_state_of_one_process(world, chunk_bytes):
    world.run(gathers, chunk_bytes)


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
    gather = gathering.Gathering("test", hvd.global_process_set, rank)
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
    gather = gathering.Gathering("test", hvd.global_process_set, rank)
    with pytest.raises(ValueError, match=r"'step' of 'w' is 0.0 for .* but 1.0 for 2 to 3"):
        gather.full_states([whole], [(part, {"step": torch.tensor(float(rank))})])
    buffer = {"buffer": torch.ones(2)}
    with pytest.raises(ValueError, match=r"has \['buffer'\] for .* but \[\] for 2 to 3"):
        gather.full_states([whole], [(part, {} if rank else buffer)])
    with pytest.raises(ValueError, match=r"has the elements 2 to 3 of 'w'"):
        gather.full_states([whole], [] if rank else [(part, buffer)])


@pytest.mark.ranks(2)
def test_states_that_do_not_belong_together_are_an_error_on_every_rank(world):
    world.run(gathers_what_disagrees)
