"""HVDLITE_CHECK_NUMERICS=1: NaN and infinite gradients, found before they are reduced, while it is
still known which rank has them.

Each rank looks at a bucket when that is complete: one pass over memory that the copies have just
written. What it finds travels as a few numbers in a sum of its own, which is posted with the last
bucket and waited for with the buckets: no round trip more. So after the round all ranks know the
same, also where each has only a part of the reduced gradients.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import torch

from hvdlite.collectives.differing_ranks import ranks_in_words
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.slot import real_view
from hvdlite.optimizer.checks.rows import Rows
from hvdlite.own_names import own_name
from hvdlite.world.teams.team import Team

_NAN, _INFINITE, _TOO_LARGE = 1, 2, 3
_WORDS = {
    _NAN: "NaN in",
    _INFINITE: "an infinite number in",
    _TOO_LARGE: "a number too large for the compression in",
}
_UNKNOWN, _FINITE, _NOT_FINITE = 0, 1, 2
_LOSSES = {
    _UNKNOWN: "the loss there is not known",
    _FINITE: "the loss there was finite, so it began in backward: in the gradient of sqrt, log, a "
    "norm or a division at 0, for instance, or in an overflow; "
    "torch.autograd.set_detect_anomaly(True) names the operation",
    _NOT_FINITE: "the loss there was not finite, so it began in forward or before it: look at that "
    "rank's batch, at the learning rate, and at the step before",
}


class Numerics(Rows):
    """Of one round."""

    def __init__(self, team: Team, name: str, parameters: Sequence[tuple[str, torch.Tensor]]):
        """Every member makes it before the same round. name: the same on every member. parameters:
        with their names."""
        # How many gradients, the first of them, what is in that, and the loss.
        super().__init__(team, own_name(name, "numerics", "the search for NaN in {}"), 4)
        self._names = [each for each, _ in parameters]
        self._index_of = {id(param): index for index, (_, param) in enumerate(parameters)}
        # By the index of a parameter, what is in its gradient; in the order in which they came.
        self._found: dict[int, int] = {}
        self._loss = _UNKNOWN

    def look_into(self, bucket: Bucket) -> None:
        """Before the bucket starts. May be called again. Waits for the device if it is not in host
        memory."""
        sent, kind = bucket.contributions(), 0
        if is_finite(sent):
            dtype = bucket.wire.dtype
            if dtype is real_view(sent).dtype or is_finite(real_view(sent).to(dtype)):
                return
            kind = _TOO_LARGE
        for slot in bucket.slots:
            values = real_view(bucket.contribution(slot).detach())
            self.look_at(slot.param, values.to(bucket.wire.dtype) if kind else values, kind)

    def look_at(self, param: torch.Tensor, values: torch.Tensor, kind: int = 0) -> None:
        """values: the gradient of this parameter. kind: what it is if it is not finite."""
        values = values.detach()
        if values.is_sparse:
            values = values._values()
        if is_finite(values):
            return
        found = kind or (_NAN if bool(values.isnan().any()) else _INFINITE)
        self._found.setdefault(self._index_of[id(param)], found)
        if self._loss == _UNKNOWN:
            self._loss = _loss_of_backward()

    def post(self) -> None:
        """When all gradients of the round have come. Collective; does not block; posts once."""
        if not self.posted():
            first = next(iter(self._found), 0)
            self.put([len(self._found), first, self._found.get(first, 0), self._loss])
            super().post()

    def report(self, step: int) -> str | None:
        """After `wait`: what some ranks have found, as the same text on every rank; or None.
        step: the number of the step, from 1."""
        found = {rank: row for rank, row in self.by_rank().items() if row[0]}
        if not found:
            return None
        rank, *others = found
        count, first, kind, loss = found[rank].tolist()
        also = f", and some on {ranks_in_words(others)}" if others else ""
        since = " since the last hvd.join()" if self._team.era else ""
        return (
            f"DistributedOptimizer: step {step}{since} has {_WORDS[kind]} the gradient of "
            f"{self._names[first]!r} on rank {rank} ({count} of its {len(self._names)} gradients"
            f"{also}); {_LOSSES[loss]}"
        )


def is_finite(values: torch.Tensor) -> bool:
    """Whether all numbers are finite. The sum is not if one of them is not: that takes one pass,
    without memory. But it may also overflow."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _loss_of_backward() -> int:
    """Whether what the script calls backward on is finite, if autograd calls this in the thread of
    the script. Never raises: other ranks don't see what is found here."""
    code = torch.autograd.backward.__code__
    frame: types.FrameType | None = sys._getframe(1)
    outermost = None  # inside it, torch.utils.checkpoint may call backward, too
    while frame is not None:
        outermost = frame if frame.f_code is code else outermost
        frame = frame.f_back
    given = outermost.f_locals.get("tensors") if outermost else None
    try:
        losses = (given,) if isinstance(given, torch.Tensor) else tuple(given or ())
        # Other kinds may be edges of the graph, or communicate when they are looked at.
        if not losses or any(type(each) is not torch.Tensor for each in losses):
            return _UNKNOWN
        return _FINITE if all(is_finite(each.detach()) for each in losses) else _NOT_FINITE
    except Exception:
        return _UNKNOWN
