"""The weights that `set_weight` gives to this rank's backward passes.

With weights w, the reduced gradient is Σ w·g / Σ w over all ranks and all passes of a round: that
of the joined batch, if w is the number of samples and each loss is a mean over them.

- On one host the engine multiplies as it adds, and divides: the weights travel with the starts of
  the buckets. Else:
- A gradient is multiplied by the weight where it is copied to its bucket. If a pass only
  accumulates, it is multiplied before autograd adds it: `.grad` holds Σ w·g until the round.
- The weights travel in the last bucket (`hvdlite.optimizer.buckets.weight_codes`), or with the rows
  of sparse gradients. So a round costs no operation more.
- After the round every rank divides what it has of the sums by the same number.

A gradient of weight 0 counts as zero, even if it is NaN, as the mean of an empty batch is.

On a rank that trains alone (a world of one, or outside the process set) no round's end can divide.
There `.grad` is the mean of the passes so far, of weights w₁ … wₖ whose sum is Wₖ, after each:

    meanₖ = Wₖ₋₁/Wₖ · meanₖ₋₁ + wₖ/Wₖ · gₖ
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.backward_pass import BackwardPass
from hvdlite.optimizer.buckets import weight_codes
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.uncompiled import uncompiled
from hvdlite.own_names import words_of

# A float16 has 11 binary digits from 6e-5 on, and fewer below. With this weight gradients from 0.06
# on keep all of them, and smaller ones some.
_LEAST_IN_HALF = 0.001


class Weights:
    """The weights of one optimizer on this rank."""

    def __init__(self) -> None:
        # What the next backward pass counts with; and whether one has counted with it. None: there
        # are no weights.
        self.given: float | None = None
        self.is_used = False
        # The sum over the passes since the last round; None: none had a weight.
        self.total: float | None = None
        # The gradients of several passes add up, so each is multiplied before. Those of one pass
        # can leave it to the engine.
        self.add_up = False
        # It also has a weight that the engine can multiply by: 0 · NaN would be NaN.
        self._to_engine = False
        # The total of the last round.
        self.last: float | None = None
        # An optimizer calls its closure, perhaps several times in this step.
        self.in_closure = False

    def give(self, weight: float) -> None:
        self.given, self.is_used = weight, False

    def begin_pass(self, slots: Iterable[Slot], adds_up: bool = False) -> None:
        """A backward pass has begun, after its first gradient has come. adds_up: no round is at its
        end."""
        if self.given is None:
            return
        if self.total is None:
            # What is left from an earlier round.
            for slot in slots:
                slot.weighed.clear()
        self.add_up = adds_up or self.total is not None
        self._to_engine = not self.add_up and self.given != 0
        self.total, self.is_used = (self.total or 0.0) + self.given, True

    def of_round(self, slots: Iterable[Slot]) -> float | None:
        """A round begins: its weight on this rank; None if it has none."""
        if self.total is None:
            # `step` reduces, and no backward has reached a parameter.
            self.begin_pass(slots)
        return self.total

    def end_step(self) -> None:
        """The gradients are used or dropped. A weight that has counted is forgotten."""
        self.total = None
        if self.is_used and not self.in_closure:
            self.given, self.is_used = None, False

    def on_copy(self, slot: Slot) -> tuple[float | None, list[object]]:
        """A gradient gets to its place in a bucket: by what it is multiplied there, None: by
        nothing; and its `Slot.weighed` after that."""
        bucket = slot.bucket
        if self.total is None or (self._to_engine and bucket is not None and bucket.weighs):
            return None, []
        if slot.weighed:
            return None, slot.weighed
        return (None if self.given == 1.0 else self.given), [True]

    def of_rows(self, slot: Slot, grad: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient whose rows are to be gathered, multiplied."""
        given = self.given
        if grad is None or self.total is None or given is None or given == 1.0 or slot.weighed:
            return grad
        return weighed(grad.detach(), given)

    def require_range(self, gradients: Gradients) -> None:
        """After the reductions of a round.

        Raises:
            HorovodInternalError: Gradients have travelled as float16, and the weights of all ranks
                were so small that the products have lost their digits; on every rank.
        """
        if self.total is None or not gradients.buckets or not gradients.in_half:
            return
        carrier = gradients.carrier
        largest = self.total if carrier is None else carrier.largest_weight()
        if 0 < largest < _LEAST_IN_HALF:
            raise HorovodInternalError(
                f"{words_of(gradients.name)}: the largest weight of all ranks is {largest:g}, and "
                "the gradients travel as float16, in which their products with weights below "
                f"{_LEAST_IN_HALF:g} lose their digits. Give fractions of the largest batch, "
                "optimizer.set_weight(len(batch) / batch_size), or use Compression.bf16, which "
                "takes all weights. No parameter has changed"
            )

    def divide(self, gradients: Gradients) -> None:
        """After the reductions of a round: divides the gradients in buckets by the weights of all
        ranks, where the engine has not."""
        team, carrier = gradients.team, gradients.carrier
        if self.total is None or team is None:
            return
        buckets = [bucket for bucket in gradients.buckets if not bucket.weighs]
        if not buckets:
            return
        of_all = self.total if carrier is None else carrier.total_weight()
        factor = weight_codes.quotient(team.size, of_all)
        if factor != 1.0:
            for bucket in buckets:
                bucket.divide(factor)

    def watch(
        self,
        slots: Iterable[Slot],
        on_gradient: Callable[[Slot, torch.Tensor], torch.Tensor | None],
    ) -> None:
        """From now on autograd asks `on_gradient` by what a gradient is replaced, before it adds it
        to `.grad`."""
        for slot in slots:
            # Replacing a parameter's `.data` may give it another node.
            node = torch.autograd.graph.get_gradient_edge(slot.param).node
            if slot.weigher is None or slot.weigher[0] is not node:
                replaced = functools.partial(on_gradient, slot)
                slot.weigher = node, node.register_prehook(_prehook(replaced))


class WeightsAlone:
    """Makes means of the gradients of backward passes that add up, on a rank that trains alone."""

    def __init__(self, weights: Weights, accumulates: Callable[[], bool]) -> None:
        """accumulates: whether the backward pass that runs adds to the gradients of others."""
        self._weights = weights
        self._accumulates = accumulates
        self._lock = threading.RLock()
        self._params: Sequence[torch.Tensor] = ()
        # Autograd's nodes of these, which live as long as somebody has them; and the hooks on them.
        self._hooks: list[tuple[Any, Any]] = []
        self._pass: BackwardPass | None = None
        # By what the gradients of the pass are multiplied.
        self._factor = 1.0

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """From now on makes the means of these parameters' gradients, and of no others'."""
        for _, hook in self._hooks:
            hook.remove()
        self._params = [param for param in params if param.requires_grad]
        nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in self._params]
        self._hooks = [(n, n.register_prehook(_prehook(self._replaced))) for n in nodes]

    def _replaced(self, grad: torch.Tensor) -> torch.Tensor | None:
        with self._lock:
            given = self._weights.given
            if given is None:
                return None
            self._weights.is_used = True
            if given and not self._accumulates():
                return None
            if self._pass is None or not self._pass.runs():
                self._begin_pass(given)
            return None if self._factor == 1.0 else weighed(grad, self._factor)

    def _begin_pass(self, given: float) -> None:
        """Before its first gradient is added: what is there counts less from now on."""
        former = self._weights.total or 0.0
        self._pass = BackwardPass(lambda: None, lambda _: None)
        self._weights.begin_pass(())
        total = former + given
        self._factor = given / total if total else 0.0
        if former and given:
            with torch.no_grad():
                for param in self._params:
                    if param.grad is not None:
                        param.grad.mul_(former / total)


def weighed(grad: torch.Tensor, weight: float) -> torch.Tensor:
    return torch.zeros_like(grad) if weight == 0 else grad * weight


def put(place: torch.Tensor, grad: torch.Tensor, factor: float | None) -> None:
    """place = factor · grad, or grad if factor is None."""
    if factor is None:
        place.copy_(grad)
    elif factor == 0:
        place.zero_()
    else:
        torch.mul(grad, _scalar(factor), out=place)


# The same bits as with a number, of which torch makes such a tensor at each call.
@functools.lru_cache(maxsize=8)
def _scalar(factor: float) -> torch.Tensor:
    return torch.tensor(factor, dtype=torch.float64, device="cpu")


def _prehook(
    replaced: Callable[[torch.Tensor], torch.Tensor | None],
) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor] | None]:
    """For autograd's node of a parameter. replaced: gives what is to be added to `.grad` in place
    of a gradient; None: the gradient."""

    def prehook(grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        new = None if grads[0] is None else replaced(grads[0])
        return None if new is None else (new,)

    return uncompiled(prehook)
