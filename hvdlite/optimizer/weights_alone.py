"""Weights on a rank that trains alone: in a world of one, or outside the optimizer's process set.

Nothing is reduced there, so no round's end can divide by the weights. Instead `.grad` is the mean
of the passes so far, of weights w₁ … wₖ whose sum is Wₖ, after each of them:

    meanₖ = Wₖ₋₁/Wₖ · meanₖ₋₁ + wₖ/Wₖ · gₖ
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.optimizer.backward_pass import BackwardPass
from hvdlite.optimizer.uncompiled import uncompiled
from hvdlite.optimizer.weights import Weights, weighed


class WeightsAlone:
    """Makes means of the gradients of backward passes that add up, by hooks of autograd."""

    def __init__(self, weights: Weights, accumulates: Callable[[], bool]) -> None:
        """accumulates: whether the backward pass that runs adds to the gradients of others."""
        self._weights = weights
        self._accumulates = accumulates
        self._lock = threading.RLock()
        self._params: Sequence[torch.Tensor] = ()
        # By autograd's node of a parameter: the hook on it.
        self._hooks: dict[Any, Any] = {}
        self._pass: BackwardPass | None = None
        # By what the gradients of the pass are multiplied.
        self._factor = 1.0

    def watch(self, params: Sequence[torch.Tensor]) -> None:
        """From now on makes the means of these parameters' gradients, and of no others'."""
        self._params = [param for param in params if param.requires_grad]
        nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in self._params]
        for node in self._hooks.keys() - set(nodes):
            self._hooks.pop(node).remove()
        for node in nodes:
            if node not in self._hooks:
                self._hooks[node] = node.register_prehook(self._replaced)

    @uncompiled
    def _replaced(self, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        """What autograd is to add to `.grad` in place of the gradient; None: the gradient."""
        with self._lock:
            given = self._weights.given
            if given is None:
                return None
            self._weights.note_use()
            if given and not self._accumulates():
                return None
            if self._pass is None or not self._pass.runs():
                self._begin_pass(given)
            if grads[0] is None or self._factor == 1.0:
                return None
            return (weighed(grads[0], self._factor),)

    def _begin_pass(self, given: float) -> None:
        """Before its first gradient is added: what is there counts less from now on."""
        former = self._weights.total or 0.0
        self._pass = BackwardPass(_nothing, _nothing)
        self._weights.begin_pass(())
        total = former + given
        self._factor = given / total if total else 0.0
        if former and given:
            with torch.no_grad():
                for param in self._params:
                    if param.grad is not None:
                        param.grad.mul_(former / total)


def _nothing(_: object = None) -> None:
    pass
