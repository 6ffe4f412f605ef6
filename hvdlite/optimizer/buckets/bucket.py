"""A bucket: flat memory for gradients that are reduced together."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hvdlite import _core
from hvdlite.compression import Compression, Compressor
from hvdlite.observe import waits
from hvdlite.ops import DTYPES, TENSORS_ARE_DESCRIBED, Average, ReduceOp, Sum
from hvdlite.optimizer.buckets import weight_codes
from hvdlite.optimizer.buckets.layout import (
    LARGEST_BYTES,
    LARGEST_FIRST_BYTES,
    BucketLayout,
    Item,
    assign,
    sizes_bytes,
)
from hvdlite.optimizer.buckets.pages import Pages
from hvdlite.optimizer.buckets.positions import ELEMS as POSITION_ELEMS
from hvdlite.optimizer.buckets.positions import Position, is_one, one_hots
from hvdlite.optimizer.buckets.slot import Form, Slot, check_reducible, place_in, real_view
from hvdlite.world.config import Config
from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")
SHOWN = 16  # buckets whose sizes are logged


@dataclass(frozen=True)
class Combining:
    """How the ranks' gradients are combined."""

    op: ReduceOp
    predivide: float
    compression: type[Compressor]
    # By a parameter's id, its group: gradients of a group are reduced together, of any size.
    group_of: dict[int, int]

    def factors(self, size: int, added: int = 1) -> tuple[ReduceOp, float, float]:
        """The reduce op, and the factors before and after the sum. added: how many gradients each
        rank has added up before."""
        if self.predivide == 1.0:
            return self.op, 1.0, 1.0 / added if self.op is Average else 1.0
        assert self.op is Average
        return Sum, 1 / self.predivide, self.predivide / size

    def counts_all_ranks(self, total: float, size: int) -> bool:
        """Whether this is the total of a one from every rank; it may be rounded to 16 bits."""
        whole = size if self.op is Sum else 1
        return total > whole * (1 - 0.5 / size)

    def options(self) -> tuple[tuple[str, str], ...]:
        """Name and value in words, as arguments of DistributedOptimizer."""
        known = {value: f"Compression.{name}" for name, value in vars(Compression).items()}
        return (
            ("op", repr(self.op)),
            ("gradient_predivide_factor", repr(self.predivide)),
            ("compression", known.get(self.compression, self.compression.__name__)),
        )


class Bucket(_core.GradientCount):
    """Gradients that are reduced together.

    pending: in this round, how many of them have not come yet. takes_copies: whether a gradient
    needs nothing but a copy to get to its place.

    flat: their memory. wire: what is reduced. It is the same memory, unless gradients are
    compressed or on a device that neither the engine nor a GPU queue can reach; then `_load` and
    `_unload` copy there and back.
    """

    # Whether its gradients are reduced on a GPU.
    in_gpu_queue = False
    # What the mask of a gradient is, so that the plan makes a sum or an average of ones of it.
    one = 1.0

    def __init__(
        self,
        layout: BucketLayout,
        slots: Sequence[Slot],
        compression: type[Compressor],
        pages: Pages | None = None,
    ) -> None:
        """pages: where the memory lies that `give_back` gives back; None: nothing is."""
        self.slots = [slots[i] for i in layout.members]
        like = self.slots[0].param
        self._pages = pages
        # Parameters come in the memory, after an update.
        self.is_lent = False
        # Zeros also in the gaps between gradients, which are summed too.
        self.flat = self.zeros(layout.elems, like.dtype, like.device)
        for position, slot in enumerate(self.slots):
            slot.bucket = self
            slot.position = position
            offset = layout.offsets_elems[position]
            slot.view = place_in(self.flat, offset, slot.param)
            if slot.form is Form.ROWS:
                slot.rows = self.flat[offset + slot.param.numel() :][: slot.param.shape[0]]
        # Behind the gradients, one number for each: 0 if this rank has none, 1 if it has one,
        # infinity if it is not of the form that its place is for. Then a 1 for this rank: a joined
        # rank adds none.
        self.mask = self.flat[layout.mask_offset_elems : layout.weights_offset_elems]
        # The gradients without all of that; and whether the engine weighs them as it adds.
        self.gradients = self.flat[: layout.mask_offset_elems].data
        self.weighs = False
        real = real_view(self.flat)
        dtype = compression.travels_as(real.dtype)
        stays = like.is_cpu or self.in_gpu_queue
        self.wire = real
        if dtype is not real.dtype or not stays:
            device = like.device if stays else "cpu"
            self.wire = self.zeros(real.numel(), dtype, device)
        # The plan, and its run in this round; each empty until there is one. They are lists so that
        # one call into C makes the object and stores it: no signal's exception can come in between
        # and lose it.
        self.plans: list[_core.Plan] = []
        self.runs: list[Any] = []  # operations; on a GPU, postings
        # Last, the position of the round, in the one bucket that carries it; zeros in the others.
        self.position = self.wire[-POSITION_ELEMS:]
        self.carries = False
        self._member = (0, 1)
        # Before it, in the same bucket, the ranks' weights.
        self.weights = self.wire[len(self.wire) - POSITION_ELEMS - layout.weights_elems :][
            : layout.weights_elems
        ]
        self._one_hots: Sequence[torch.Tensor] = ()
        # Slots not yet known to be sparse or dense; and slots whose result is sparse.
        self.unknown = [slot for slot in self.slots if slot.form is Form.UNKNOWN]
        self.in_rows = [slot for slot in self.slots if slot.form is Form.ROWS]
        self.pending = len(self.slots)
        self.takes_copies = like.is_cpu and TENSORS_ARE_DESCRIBED
        # In this round, by position: those that this rank does not have, and those of another form
        # than their place is for.
        self.absent: list[int] = []
        self.misplaced: list[int] = []

    def zeros(self, elems: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Memory as large as the bucket, which `give_back` gives back."""
        make = torch.zeros if self._pages is None else self._pages.zeros
        return make(elems, dtype=dtype, device=device)

    def give_back(self) -> None:
        """Between rounds, when nobody needs the gradients any more: gives their memory back to the
        system until the next round. `.grad` must not lie there; what else the user keeps gets
        memory of its own. Does nothing while the memory is lent."""
        if self._pages is None or self.is_lent:
            return
        for slot in self.slots:
            if slot.is_kept():
                slot.give_away_copy()
        self._pages.give_back()

    def carry_position(self, member: int, members: int) -> None:
        """From now on its runs carry the position of the round, and the members' weights."""
        self.carries, self._member = True, (member, members)
        self._one_hots = one_hots(self.wire)

    def make_plan(
        self,
        team: Team,
        name: str,
        op: ReduceOp,
        prescale: float,
        post: float,
        weighs: bool,
    ) -> None:
        """Collective over the team, but does not block. Does nothing if it has a plan.

        weighs: whether the engine can weigh what it adds.
        """
        if self.plans:
            return
        wire = self.wire
        self.weighs = weighs
        make = partial(
            team.plan,
            *(name, DTYPES[wire.dtype], op, wire.data_ptr(), wire.data_ptr(), wire.numel()),
            *(prescale, post),
            weighted=self.weighted_elems(),
        )
        self.plans.extend(map(make, (wire,)))

    def gather(self) -> None:
        """All gradients have come that will before it starts. May be called again."""

    def contribution(self, slot: Slot) -> torch.Tensor:
        """Before it starts: where this rank's gradient lies."""
        assert slot.view is not None
        return slot.view

    def contributions(self) -> torch.Tensor:
        """The same: the memory of all of them."""
        return self.gradients

    def weighted_elems(self) -> int:
        """How many elements of what is reduced the engine weighs."""
        return len(real_view(self.gradients)) if self.weighs else 0

    def start(self, position: Position) -> None:
        """Starts its plan; returns at once. Does nothing if it has started in this round."""
        if self.runs:
            return
        if self.takes_copies:
            # Autograd, which may have saved a view of an earlier gradient, does not see hooks copy.
            torch.autograd.graph.increment_version([slot.view for slot in self.slots])  # type: ignore[misc]
        self.mask.fill_(self.one)
        if self.absent:
            self.mask[self.absent] = 0
        if self.misplaced:
            self.mask[self.misplaced] = math.inf
        self._load()
        if self.carries:
            self.position.copy_(self._one_hots[position.row()])
            weight_codes.put(self.weights, *self._member, position.weight)
        start: Any = type(self.plans[0]).start
        weights = itertools.repeat(position.weight if self.weighs else None)
        in_input = itertools.repeat(position.weight_in_input)
        self.runs.extend(map(start, self.plans, self.memories(), weights, in_input))

    def memories(self) -> Sequence[torch.Tensor]:
        """By plan, the memory that its runs need."""
        return (self.wire,)

    def wait(self) -> str | None:
        """Blocks until the reduced gradients are in their places. Returns the text of the failure,
        or None. May be called again."""
        run: _core.Operation = self.runs[0]
        if waits.observed():
            with waits.waiting(run):
                text = run.wait()
        else:
            text = run.wait()
        if text is None:
            self._unload()
        return text

    def total_weight(self) -> float:
        """After `wait`, if it carries the position: the sum of the ranks' weights."""
        return weight_codes.total(self.weights, self._member[1])

    def largest_weight(self) -> float:
        """The same: the largest of them."""
        return max(weight_codes.weights(self.weights, self._member[1]))

    def divide(self, factor: float) -> None:
        """After `wait`: multiplies by this what the rank has of the reduced gradients."""
        for tensor in self.reduced():
            tensor.mul_(factor)

    def reduced(self) -> Sequence[torch.Tensor]:
        """After `wait`, the memory in which the rank has reduced gradients."""
        return (self.gradients,)

    def ends_within(self, limit_s: float) -> bool:
        """Whether the reduction has ended by then. Blocks for so long at most."""
        run: Any = self.runs[0]
        if not limit_s:
            return bool(run.poll())
        if waits.observed():
            with waits.waiting(run):
                return bool(run.drive(limit_s))
        return bool(run.drive(limit_s))

    def has_position(self) -> bool:
        """Whether the position of the round is on its way, if it carries it."""
        return bool(self.runs)

    def positions_differ(self, or_are: bool = False) -> bool:
        """After `wait`: whether the ranks were at different positions; or_are: or it has succeeded.
        The same on all of them, if those at the same position give the same `or_are`."""
        failure = self.runs[0].wait()
        return failure is None and (or_are or not is_one(self.position))

    def reset(self) -> None:
        """Prepares for the next round."""
        self.runs.clear()
        self.pending = len(self.slots)
        self.absent = []
        self.misplaced = []

    def totals(self) -> list[float]:
        """The sums of the masks, after the reduction. 0: no rank has this gradient; infinity:
        on some rank it has another form. The last one counts the ranks. All are combined with the
        op of the gradients."""
        mask = self.mask.real if self.mask.is_complex() else self.mask
        return mask.tolist()

    def _load(self) -> None:
        if not self._same_memory():
            self.wire.copy_(real_view(self.flat))

    def _unload(self) -> None:
        if not self._same_memory():
            real_view(self.flat).copy_(self.wire)

    def _same_memory(self) -> bool:
        wire, flat = self.wire, self.flat
        return wire.data_ptr() == flat.data_ptr() and wire.device == flat.device


@dataclass(frozen=True)
class Sizing:
    """What determines the sizes of buckets, beside the gradients; the same on all members.

    overlaps: whether reductions run while the ranks compute without slowing them down. members: how
    many ranks have places for their weights. on_gpus: some gradients are there, where a launch
    costs the host more than NCCL needs for many bytes.
    """

    config: Config
    several_hosts: bool
    overlaps: bool
    members: int = 0
    on_gpus: bool = False

    def limits_bytes(self, total_bytes: int) -> tuple[int, int]:
        """The size of buckets, and of the first one: from the knobs, else by `sizes_bytes`."""
        size, first = self.config.bucket_bytes, self.config.first_bucket_bytes
        measured, first_measured = LARGEST_BYTES, LARGEST_FIRST_BYTES
        if not self.on_gpus:
            measured, first_measured = sizes_bytes(total_bytes, self.several_hosts, self.overlaps)
        if size >= 0:
            first_measured = min(size, LARGEST_FIRST_BYTES)
        return size if size >= 0 else measured, first if first >= 0 else first_measured


MakeBucket = Callable[[BucketLayout, Sequence[Slot], type[Compressor], Pages | None], Bucket]


def lay_out(slots: Sequence[Slot], combining: Combining, sizing: Sizing) -> list[list[Slot]]:
    """The slots of each bucket, in the order of the buckets; only slots that need a place."""
    placed = in_backward_order(slots)
    return [[placed[i] for i in layout.members] for layout in _layouts(placed, combining, sizing)]


def in_backward_order(slots: Sequence[Slot]) -> list[Slot]:
    """The slots that need a place. Those with an unknown index come last, the last parameters
    first."""
    placed = [slot for slot in reversed(slots) if slot.form is not Form.SPARSE]
    return sorted(
        placed, key=lambda slot: math.inf if slot.backward_index is None else slot.backward_index
    )


def _layouts(
    placed: Sequence[Slot], combining: Combining, sizing: Sizing
) -> tuple[BucketLayout, ...]:
    items = [
        Item(
            slot.param.numel() + (slot.param.shape[0] if slot.form is Form.ROWS else 0),
            slot.param.element_size(),
            (slot.param.dtype, slot.param.device, slot.in_parts),
            combining.group_of.get(id(slot.param)),
        )
        for slot in placed
    ]
    return assign(items, *sizing.limits_bytes(sum(item.elems * item.elem_bytes for item in items)))


def make_buckets(
    slots: Sequence[Slot],
    combining: Combining,
    sizing: Sizing,
    make: MakeBucket,
    *,
    gives_back: bool = False,
) -> list[Bucket]:
    """Buckets for the slots that need a place, without their plans. Not collective; may be called
    again. gives_back: whether their memory can be given back to the system.

    Raises:
        ValueError: A parameter's gradients can't be reduced.
    """
    for slot in slots:
        slot.bucket = slot.view = slot.rows = None
        check_reducible(slot.name, slot.param)
        slot.note_parameter()
    placed = in_backward_order(slots)
    layouts = list(_layouts(placed, combining, sizing))
    if layouts:
        # The last one carries the weights.
        last = layouts[-1]
        param = placed[last.members[0]].param
        dtype = combining.compression.travels_as(
            (param.real if param.is_complex() else param).dtype
        )
        weights_elems = weight_codes.elems(dtype, sizing.members)
        layouts[-1] = dataclasses.replace(last, weights_elems=weights_elems)
    return [
        make(layout, placed, combining.compression, Pages() if gives_back else None)
        for layout in layouts
    ]


def log_sizes(rank: int, name: str, buckets: Sequence[Bucket]) -> None:
    """At the level debug, how many gradients are reduced together, and their bytes."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    params = [[slot.param for slot in bucket.slots] for bucket in buckets]
    sizes = [str(sum(p.numel() * p.element_size() for p in each)) for each in params]
    log.debug(
        "rank %d: %s: %d gradient%s in %d bucket%s of %s bytes",
        rank,
        name,
        gradients := sum(map(len, params)),
        "s" * (gradients != 1),
        len(buckets),
        "s" * (len(buckets) != 1),
        ", ".join([*sizes[:SHOWN], *["…"] * (len(sizes) > SHOWN)]) or "0",
    )
