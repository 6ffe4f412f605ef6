"""One gradient and its place in a bucket."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hvdlite import _core
from hvdlite.ops import DTYPES
from hvdlite.world.process import gpu_pinning

if TYPE_CHECKING:
    from hvdlite.optimizer.buckets.bucket import Bucket


class Form(enum.Enum):
    """The form of a parameter's gradients on all ranks, as far as the rounds have shown.

    It is the same on all ranks: it changes only by results of a round, which all ranks have.
    """

    UNKNOWN = enum.auto()  # in a bucket, until the first gradient shows its form
    DENSE = enum.auto()  # in a bucket; a sparse gradient is made dense
    SPARSE = enum.auto()  # in no bucket: its rows are gathered
    ROWS = enum.auto()  # in a bucket, with one number per row; the result is sparse


class Slot(_core.Gradient):
    """One parameter's gradient, and its place in a bucket if it has one.

    What its hook knows is in the base class:

    param, bucket, view: the bucket and the place in it are None if the gradients are sparse.
    rows: with Form.ROWS, behind its place: a one for each row that this rank has.
    round_grad: the tensor that a round has put into `.grad`.
    last_round: the last round for which this rank, or another, had a gradient.
    unreduced_round: the round for which a backward that did not communicate left a gradient.
    is_sharded: some ranks have nothing of its reduced gradient, or only a part.
    """

    __slots__ = (
        "arrives_weighed",
        "backward_index",
        "form",
        "in_parts",
        "made_for",
        "name",
        "position",
        "unhook",
        "weighed",
        "weigher",
    )

    bucket: Bucket | None

    def __init__(
        self, arrivals: _core.Arrivals, name: str, param: torch.Tensor, form: Form
    ) -> None:
        super().__init__(arrivals, param)
        self.name = name
        self.form = form
        # Of its reduced gradient each rank has a part, in a bucket that is reduced to owners.
        self.in_parts = False
        # Removes the hook of autograd; None if there is none.
        self.unhook: Callable[[], None] | None = None
        # Its index among its bucket's gradients.
        self.position = 0
        # Its index in the backward order, from 1; None: not known yet.
        self.backward_index: int | None = None
        # Autograd has been given its gradient already multiplied by the weight; and what does that:
        # autograd's node, and the hook on it.
        self.arrives_weighed = False
        self.weigher: tuple[Any, Any] | None = None
        # Not empty if this round's gradient, which is `.grad`, or what the script has made of that
        # and put in its place, has been multiplied by this rank's weights.
        self.weighed: list[object] = []
        # The parameter's dtype, shape … when its place was made.
        self.made_for: object = None

    def note_parameter(self) -> None:
        """Notes that its place fits the parameter as it is now."""
        self.made_for = _make(self.param)

    def has_changed(self) -> bool:
        """Whether the parameter's dtype, shape, device or strides no longer fit its place."""
        return _make(self.param) != self.made_for

    def has_come(self) -> bool:
        """Whether the round that is open has its gradient, from this rank or another."""
        return self.last_round == self.arrivals.number

    def note_arrival(self) -> None:
        self.last_round = self.arrivals.number

    def is_left_over(self) -> bool:
        """Whether earlier backward passes have left a gradient for the next round, or the open
        one."""
        return self.unreduced_round == self.arrivals.number

    def put_off(self) -> None:
        """The open round ends without a result: what has come for it counts in the next one."""
        number = self.arrivals.number
        if self.last_round == number:
            self.last_round, self.unreduced_round = -1, number
        if self.unreduced_round == number:
            self.unreduced_round += 1

    def take_result(self, grad: torch.Tensor | None) -> None:
        """`.grad` becomes what the open round has made of it."""
        self.param.grad = self.round_grad = grad
        self.note_arrival()

    def has_result(self) -> bool:
        """Whether a round of this step has reduced its gradient."""
        return self.last_round >= self.arrivals.first_of_step

    def is_reduced(self, grad: torch.Tensor | None) -> bool:
        """Whether this, its `.grad`, is the result of a round of this step."""
        return self.has_result() and (grad is self.round_grad or self.is_sharded)

    def is_kept(self) -> bool:
        """Whether the user keeps the gradient of an earlier step, whose memory is its place."""
        # The references that are not the user's: those of this slot, and that of the call.
        own = 2 + (self.round_grad is self.view) + any(kept is self.view for kept in self.weighed)
        return sys.getrefcount(self.view) > own

    def move_from(self, former: torch.Tensor) -> None:
        """Moves a gradient from its former place to the present one."""
        if self.param.grad is not former or self.view is None:
            return
        self.view.copy_(former)
        self.param.grad = self.view
        if self.round_grad is former:
            self.round_grad = self.view

    def give_away_copy(self) -> None:
        """Moves the values that the user holds into memory of their own, and so frees the place."""
        former = self.view
        assert former is not None
        # In one statement: no signal's exception can come in between.
        self.view, former.data = former.data, former.clone()


def check_reducible(name: str, param: torch.Tensor) -> None:
    """Raises ValueError if collectives don't support this parameter's gradients."""
    if param.is_cuda and gpu_pinning.refusal:
        raise ValueError(gpu_pinning.refusal)
    if (param.real if param.is_complex() else param).dtype not in DTYPES:
        raise ValueError(f"{name!r} is {param.dtype}, which collectives do not support")


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, flat, as real numbers: a complex number is reduced as its two parts."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


def _make(param: torch.Tensor) -> object:
    return param.dtype, param.shape, param.device, strides_in_place(param)


def strides_in_place(param: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of its gradient's place: the parameter's, if these leave no gaps; None for those
    of a contiguous tensor."""
    if not param.numel() or param.is_contiguous():
        return None
    extent = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size != 1 and stride != extent:
            return None
        extent *= size
    return param.stride()


def place_in(flat: torch.Tensor, offset: int, param: torch.Tensor) -> torch.Tensor:
    """The place of a parameter's gradient in the memory of a bucket.

    `.data`, because views of one tensor share its version counter: an in-place change of one would
    count for all of them.
    """
    part = flat[offset : offset + param.numel()].data
    strides = strides_in_place(param)
    return part.view(param.shape) if strides is None else part.as_strided(param.shape, strides)
