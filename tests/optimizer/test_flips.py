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
from tests.optimizer.models import batches, loss_of, model, own

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
            torch.optim.Adam(self.net.parameters(), lr=0.01), self.net.named_parameters()
        )
        self.batches = list(batches(_EVERY, 2, hvd.size()))
        self.flipped = None
        self.bit = -1  # the last one that this rank has flipped
        # After the reduction, before the update.
        self.optimizer.register_step_pre_hook(self._flip)

    def _flip(self, *_):
        if self.flipped is None:
            return
        find, seed = self.flipped
        values, chance = find().detach().view(-1), random.Random(seed)
        in_bytes, least = values.view(torch.uint8), min(0.0, float(values.min()))
        while True:
            self.bit = chance.randrange(8 * in_bytes.numel())
            in_bytes[self.bit // 8] ^= 1 << self.bit % 8
            if values.isfinite().all() and (least < 0 or values.min() >= 0):
                return
            in_bytes[self.bit // 8] ^= 1 << self.bit % 8

    def step(self, number, flipped=None):
        """flipped: what finds a tensor, and a seed that chooses its bit."""
        x, y = self.batches[number]
        self.flipped = flipped
        self.optimizer.zero_grad()
        loss_of(self.net, own(x, hvd.rank(), hvd.size()), own(y, hvd.rank(), hvd.size())).backward()
        self.optimizer.step()

    def values(self):
        """By name what must be the same on all ranks, in the order in which it is compared."""
        named = dict(self.net.named_parameters())
        for name, param in self.net.named_parameters():
            state = self.optimizer.state[param]
            named |= {f"{key} of {name}": state[key] for key in sorted(state)}
        return named

    def place(self, where, chance):
        """What finds a tensor in which a bit may flip, and a seed that chooses the bit."""
        named = self.values()
        if where == "gradient":
            param = chance.choice(list(self.net.parameters()))
            find = lambda: param.grad  # noqa: E731 - another tensor in each step
        else:
            names = [name for name in named if (" of " in name) == (where == "state")]
            find = named[chance.choice(names)].detach
        return find, chance.randrange(1 << 32)


def differing(named):
    """Names of tensors whose bytes differ between ranks, and the ranks that differ from the
    majority."""
    rows = [t.detach().reshape(-1).view(torch.uint8) for t in named.values()]
    by_rank = hvd.allgather(torch.cat(rows)[None], name="oracle")
    found, start = {}, 0
    for name, row in zip(named, rows, strict=True):
        parts = list(by_rank[:, start : start + len(row)])
        start += len(row)
        if not all(torch.equal(part, row) for part in parts):
            most = max(parts, key=lambda one: sum(torch.equal(one, part) for part in parts))
            found[name] = tuple(r for r, part in enumerate(parts) if not torch.equal(part, most))
    return found


def restore(named, saved):
    with torch.no_grad():
        for name, value in named.items():
            value.copy_(saved[name])


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
        when, place = chance.randrange(_EVERY), training.place(where, chance)
        at_once, error = {}, None
        for number in range(_EVERY):
            try:
                training.step(number, place if (number, rank) == (when, hvd.rank()) else None)
            except DifferenceError as raised:
                assert number == _EVERY - 1, "the check comes at the wrong step"
                error = raised
            if number == when:
                at_once = differing(training.values())
        wrong = differing(training.values())
        said = (
            f"flip {index}: {where}, rank {rank}, step {when}, bit {training.bit}: {wrong}, {error}"
        )
        assert (error is not None) == bool(wrong), said
        if error is not None:
            # State is named before parameters, which follow from it.
            first = next((name for name in wrong if " of " in name), next(iter(wrong)))
            assert error.tensor == first, said
            assert error.ranks == wrong[first] == (rank,), said
        became = "found" if wrong else "the same again" if at_once else "never differed"
        counts[f"{where}: {became}"] += 1
        if at_once and not wrong:
            finite = all(bool(value.isfinite().all()) for value in training.values().values())
            counts["the same again, finite" if finite else "the same again, NaN"] += 1
        restore(training.values(), saved)
        assert not differing(training.values())
    return dict(counts)


def test_a_flipped_bit_that_makes_ranks_differ_is_found_with_its_tensor_and_rank(world):
    knobs = {"HVDLITE_CHECK_PARAMETERS": str(_EVERY)}
    total = collections.Counter()
    for part in range(1000 // _PART if _ALL else 1):
        counts = world.run(flips, _PART, part, knobs=knobs)
        assert all(each == counts[0] for each in counts)
        assert sum(number for name, number in counts[0].items() if ":" in name) == _PART
        total.update(counts[0])
        print((part + 1) * _PART, "flips:", sorted(total.items()), flush=True)
    # Others make no difference: what is flipped is rounded away by the update.
    at_least = sum(number for name, number in total.items() if ":" in name) // len(_PLACES) // 2
    assert all(total[f"{place}: found"] >= at_least for place in _PLACES)
