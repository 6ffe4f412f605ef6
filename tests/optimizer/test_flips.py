"""One bit flips on one rank during training: HVDLITE_CHECK_PARAMETERS=N finds it within N steps.

`make test` flips a few; `make faults` (HVDLITE_TEST_FAULTS=all) flips 1,000. What counts as a flip
that is to be found: the bits of the ranks' parameters or state differ when the check is due. The
oracle compares the bytes themselves, of which every rank has all ranks'.

Only bits flip that leave their value finite: NaN spreads to all ranks through the gradients, by the
time of the check all of them have it, and it is HVDLITE_CHECK_NUMERICS that names the rank. And no
square or count of Adam falls below 0: it takes roots, of a count with an error on that rank."""

from __future__ import annotations

import collections
import os
import random

import pytest
import torch

import hvdlite as hvd
from hvdlite.errors import DifferenceError
from hvdlite.tensor_bytes import flat_bytes
from tests.optimizer.models import OPTIMIZERS, batches, loss_of, mine, model

pytestmark = [pytest.mark.ranks(3), pytest.mark.mpis("mpich")]

_ALL = os.environ.get("HVDLITE_TEST_FAULTS") == "all"
_EVERY = 3  # steps
_PART = 25 if _ALL else 30  # flips at a time
_PLACES = ("parameter", "state", "gradient")


class Training:
    """A model that is trained, and in it at most one bit that flips just before an update."""

    def __init__(self):
        self.net = model()
        self.optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["Adam"](self.net.parameters()), self.net.named_parameters()
        )
        self.batches = [mine(*batch) for batch in batches(_EVERY, 2, hvd.size())]
        self.flipped = None  # what finds a tensor, and a seed that chooses its bit
        # After the reduction, before the update.
        self.optimizer.register_step_pre_hook(self._flip)

    def _flip(self, *_):
        if self.flipped is None:
            return
        find, seed = self.flipped
        values, chance = find().detach().view(-1), random.Random(seed)
        in_bytes, least = values.view(torch.uint8), min(0.0, float(values.min()))
        while True:
            bit = chance.randrange(8 * in_bytes.numel())
            in_bytes[bit // 8] ^= 1 << bit % 8
            if values.isfinite().all() and (least < 0 or values.min() >= 0):
                return
            in_bytes[bit // 8] ^= 1 << bit % 8

    def step(self, number, flipped=None):
        self.flipped = flipped
        self.optimizer.zero_grad()
        loss_of(self.net, *self.batches[number]).backward()
        self.optimizer.step()

    def values(self):
        """By name what must be the same on all ranks, in the order in which it is compared: state
        before parameters, which follow from it."""
        named = {}
        for name, param in self.net.named_parameters():
            state = self.optimizer.state[param]
            named |= {f"{key} of {name}": state[key] for key in sorted(state)}
        return named | dict(self.net.named_parameters())

    def place(self, where, chance):
        """What finds a tensor in which a bit may flip."""
        if where == "gradient":
            param = chance.choice(list(self.net.parameters()))
            return lambda: param.grad  # another tensor in each step
        named = self.values()
        names = [name for name in named if (" of " in name) == (where == "state")]
        return named[chance.choice(names)].detach


def differing(named):
    """Names of tensors whose bytes differ between ranks, and the ranks that differ from the
    majority."""
    found = {}
    for name, tensor in named.items():
        parts = list(hvd.allgather(flat_bytes(tensor.detach())[None], name="oracle"))
        if not all(torch.equal(part, parts[0]) for part in parts):
            most = max(parts, key=lambda one: sum(torch.equal(one, part) for part in parts))
            found[name] = tuple(r for r, part in enumerate(parts) if not torch.equal(part, most))
    return found


def flips(count, seed):
    """Flips bits one after the other; counts what becomes of them."""
    hvd.init()
    training = Training()
    for number in range(_EVERY):
        training.step(number)
    counts = collections.Counter()
    chance = random.Random(seed)  # the same on every rank
    for index in range(count):
        saved = {name: value.detach().clone() for name, value in training.values().items()}
        where, rank = _PLACES[index % len(_PLACES)], chance.randrange(hvd.size())
        when, flipped = chance.randrange(_EVERY), (training.place(where, chance), f"{seed} {index}")
        error = None
        for number in range(_EVERY):
            try:
                training.step(number, flipped if (number, rank) == (when, hvd.rank()) else None)
            except DifferenceError as raised:
                assert number == _EVERY - 1, "the check comes at the wrong step"
                error = raised
        wrong = differing(training.values())
        said = f"flip {index}: {where}, rank {rank}, step {when}: {wrong}, {error}"
        assert (error is not None) == bool(wrong), said
        if error is not None:
            assert (error.tensor, error.ranks) == next(iter(wrong.items())), said
            assert error.ranks == (rank,), said
        # Others make no difference: what is flipped is rounded away by the update.
        counts[where] += bool(wrong)
        with torch.no_grad():
            for name, value in training.values().items():
                value.copy_(saved[name])
    return counts


def test_a_flipped_bit_that_makes_ranks_differ_is_found_with_its_tensor_and_rank(world):
    parts = 1000 // _PART if _ALL else 1
    total = collections.Counter()
    for part in range(parts):
        counts = world.run(flips, _PART, part, knobs={"HVDLITE_CHECK_PARAMETERS": str(_EVERY)})
        assert counts == [counts[0]] * world.size
        total.update(counts[0])
        print((part + 1) * _PART, "flips, found:", sorted(total.items()), flush=True)
    assert all(total[place] >= parts * _PART // len(_PLACES) // 2 for place in _PLACES)
