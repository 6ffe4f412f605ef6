"""Reduces gradients while backward still runs: gradient hooks → buckets → the engine's plans.

A **round** is one reduction of all buckets. Every rank runs the same rounds in the same order, and
within a round starts the buckets in the order of their index; so nothing is negotiated.

- A hook runs as soon as autograd has accumulated a parameter's gradient. It copies the gradient to
  its place in its bucket, and that place becomes `.grad`: the reduced values need no copy out.
- A bucket starts when it and all before it are complete.
- When backward ends, a callback of autograd fills the places of missing gradients with zeros,
  starts what has not started, and waits: `backward()` returns with reduced gradients.
- A rank whose backward came to no parameter at all runs its round in `step`.

With the gradients of a bucket travels one number for each: 1 where the rank has it, else 0. Where
the sum is 0 no rank has that gradient, and `.grad` stays as it was.
"""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import _core, gpu, world
from hvdlite.arena import Bucket, Slot, real_view
from hvdlite.buckets import Item, assign
from hvdlite.compression import Compressor
from hvdlite.errors import HorovodInternalError
from hvdlite.ops import DTYPES, ReduceOp, Sum

_task_id = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

_alive: weakref.WeakSet[Reducer] = weakref.WeakSet()


class Reducer:
    """The gradients of one optimizer. Its hooks live until `detach`."""

    def __init__(
        self,
        groups: Callable[[], Sequence[dict[str, Any]]],
        names: dict[int, str],
        group_of: dict[int, int],
        *,
        op: ReduceOp,
        predivide: float,
        compression: type[Compressor],
        passes: int,
        sparse_as_dense: bool,
    ) -> None:
        """groups: gives the optimizer's param_groups, as they are then. names, group_of: by the id
        of a parameter; group_of has those that are to be reduced together, whatever their size."""
        self._groups = groups
        self._names = names
        self._group_of = group_of
        self._op = op
        self._predivide = predivide
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self.passes_per_step = passes
        # Off inside no_sync().
        self.communicates = True
        # Backwards since the last round; those in no_sync() count only in the second.
        self._passes = 0
        self._unreduced_passes = 0
        self._lock = threading.Lock()
        # The graph task of autograd whose gradients come, and whether its end is awaited.
        self._task = -1
        self._in_backward = False
        self._round = 0
        # Rounds from this one on belong to the present step.
        self._first_round = 0
        # A round has begun and is not finished.
        self._open = False
        self._next = 0
        self._communicated = False
        self._world: world.World | None = None
        self._generation = 0
        self._number = -1
        self._slots: list[Slot] = []
        self._frozen: list[torch.Tensor] = []
        self._buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        self._known = -1
        self._build()
        for other in list(_alive):
            other.yield_to(self)
        _alive.add(self)

    # What the optimizer asks for.

    def in_flight(self) -> bool:
        """Whether a round has begun and was not finished, as its backward raised."""
        return self._open

    def finish(self) -> None:
        """Sees to it that all gradients of this step are reduced. Blocks.

        Raises:
            HorovodInternalError: The reduction failed.
        """
        if self._open or not self._communicated or self._unreduced_passes:
            if not self._open:
                self._rebuild_if_changed()
            self._finish_round(by_step=True)

    def next_step(self) -> None:
        """The gradients are used up or gone: the next backward belongs to another step."""
        self._round += 1
        self._first_round = self._round
        self._communicated = False
        self._passes = self._unreduced_passes = 0
        # Also where a backward raised, and so did not come to its end.
        self._in_backward = False
        self._task = -1

    def set_passes_per_step(self, passes: int) -> None:
        self.passes_per_step = passes
        self._passes = 0

    def detach(self) -> None:
        """Removes the hooks; from now on it does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._slots, self._buckets, self._frozen = [], [], []
        self._groups = lambda: ()
        self._known = 0
        _alive.discard(self)

    def yield_to(self, newer: Reducer) -> None:
        """A parameter belongs to the newest distributed optimizer that has it: reduced once."""
        theirs = {id(slot.param) for slot in newer._slots}
        if any(id(slot.param) in theirs for slot in self._slots):
            self.detach()

    # Hooks.

    def _on_gradient(self, slot: Slot, param: torch.Tensor) -> None:
        """Autograd has accumulated this parameter's gradient. In a thread of autograd."""
        with self._lock:
            task = _task_id()
            if task != self._task:
                self._begin_backward(task)
                slot = self._current(slot)
            grad = param.grad
            assert grad is not None
            if slot.mark >= self._first_round and (grad is slot.view or slot.mark == self._round):
                error = self._reached_again(slot)
                if self._open and self._next == 0:
                    self._cancel_round()
                raise error
            if not self._open:
                slot.dirty = self._round
                return
            if grad is not slot.view:
                self._take(slot, grad)
            slot.mark = self._round
            bucket = slot.bucket
            bucket.pending -= 1
            if not bucket.pending and bucket is self._buckets[self._next]:
                self._start_complete()

    def _begin_backward(self, task: int) -> None:
        """The first gradient of a backward, or of one inside it (reentrant checkpoints)."""
        self._task = task
        if self._in_backward:
            return
        self._in_backward = True
        _queue_callback(self._end_backward)
        self._rebuild_if_changed()
        self._unreduced_passes += 1
        if self.communicates:
            self._passes += 1
            if self._passes >= self.passes_per_step:
                self._open = True
                self._next = 0

    def _end_backward(self) -> None:
        self._in_backward = False
        if self._open:
            self._finish_round(by_step=False)

    def _cancel_round(self) -> None:
        """Ends a round of which nothing has started: the other ranks have not seen it either."""
        self._open = False
        self._round += 1
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)

    def _take(self, slot: Slot, grad: torch.Tensor) -> None:
        """Copies a gradient to its place, which becomes `.grad`."""
        if grad.is_sparse:
            if not self._sparse_as_dense:
                raise ValueError(
                    f"the gradient of {slot.name!r} is sparse; pass sparse_as_dense=True to "
                    "DistributedOptimizer"
                )
            grad = grad.to_dense()
        slot.view.copy_(grad.detach() if grad.requires_grad else grad)
        slot.param.grad = slot.view

    def _start_complete(self) -> None:
        buckets = self._buckets
        while self._next < len(buckets) and not buckets[self._next].pending:
            self._start(buckets[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        bucket.presence.fill_(1)
        if bucket.absent:
            bucket.presence[bucket.absent] = 0
        if not bucket.same_memory():
            bucket.wire.copy_(real_view(bucket.flat))
        bucket.operation = bucket.plan.start(bucket.wire)

    def _finish_round(self, by_step: bool) -> None:
        """Starts what has not started, waits for everything, and ends the round."""
        failure = None
        try:
            for bucket in self._buckets[self._next if self._open else 0 :]:
                if bucket.pending:
                    self._fill_absent(bucket, by_step)
                self._start(bucket)
            for bucket in self._buckets:
                assert bucket.operation is not None
                text = bucket.operation.wait()
                failure = failure or text
                if text is None:
                    self._unpack(bucket)
        finally:
            for bucket in self._buckets:
                bucket.operation = None
                bucket.pending = len(bucket.slots)
                bucket.absent = []
            self._open = self._in_backward = False
            self._next = 0
            self._round += 1
            self._communicated = True
            self._passes = self._unreduced_passes = 0
        if failure is not None:
            raise HorovodInternalError(failure)

    def _fill_absent(self, bucket: Bucket, by_step: bool) -> None:
        """Sees to the places to which this backward brought no gradient.

        Gradients that earlier backwards left count, and in a round that `step` runs all that the
        user may have set. What else lies in a place that is `.grad` must survive the round.
        """
        for position, slot in enumerate(bucket.slots):
            if slot.mark == self._round:
                continue
            grad = slot.param.grad
            reduced = slot.mark >= self._first_round
            if (
                grad is not None
                and (slot.dirty == self._round or (by_step and slot.param.requires_grad))
                and not (reduced and grad is slot.view)
            ):
                if grad is not slot.view:
                    self._take(slot, grad)
                slot.mark = self._round
                continue
            if grad is slot.view:
                slot.param.grad = grad.clone()
            slot.view.zero_()
            bucket.absent.append(position)

    def _unpack(self, bucket: Bucket) -> None:
        if not bucket.same_memory():
            real_view(bucket.flat).copy_(bucket.wire)
        if not bucket.absent:
            return
        totals = bucket.presence.tolist()
        for position in bucket.absent:
            slot = bucket.slots[position]
            if totals[position]:
                slot.param.grad = slot.view
                slot.mark = self._round

    def _reached_again(self, slot: Slot) -> RuntimeError:
        if slot.mark == self._round:
            return RuntimeError(
                f"the gradient of {slot.name!r} came twice in one reduction: by reentrant "
                "checkpoints (pass use_reentrant=False), or since an earlier backward() raised "
                "(call synchronize() and zero_grad() after it)"
            )
        return RuntimeError(
            f"backward() reached {slot.name!r}, whose gradient was reduced in this step already. "
            "To accumulate gradients over several backwards, pass backward_passes_per_step to "
            "DistributedOptimizer, or run all but the last inside no_sync(); to start anew, call "
            "the optimizer's zero_grad()"
        )

    # Building.

    def _parameters(self) -> list[torch.Tensor]:
        return [param for group in self._groups() for param in group["params"]]

    def _rebuild_if_changed(self) -> None:
        """Parameters may be frozen, thawed or added between steps, on all ranks alike; and the
        world may be a new one."""
        if (
            self._world is not world.active
            or sum(len(group["params"]) for group in self._groups()) != self._known
            or not all(slot.param.requires_grad for slot in self._slots)
            or any(param.requires_grad for param in self._frozen)
        ):
            self._build()

    def _build(self) -> None:
        active = world.current()
        if active is not self._world:
            self._world = active
            self._number = next(active.optimizer_numbers)
            self._generation = 0
        for hook in self._hooks:
            hook.remove()
        before = {id(slot.param): slot for slot in self._slots}
        params = self._parameters()
        self._known = len(params)
        self._frozen = [param for param in params if not param.requires_grad]
        self._slots = [
            Slot(self._names.get(id(param), f"parameter {i}"), param)
            for i, param in enumerate(params)
            if param.requires_grad
        ]
        for slot in self._slots:
            former = before.get(id(slot.param))
            if former is not None:
                slot.mark, slot.dirty = former.mark, former.dirty
            elif before and slot.param.grad is not None:
                # Thawed or added, and backward may have been here before its hook was.
                slot.dirty = self._round
        config = active.config
        layouts = assign(
            [self._item(slot) for slot in self._slots],
            config.bucket_bytes,
            config.first_bucket_bytes,
        )
        self._buckets = [Bucket(layout, self._slots, self._compression) for layout in layouts]
        for index, bucket in enumerate(self._buckets):
            bucket.plan = self._plan(active, index, bucket)
        self._generation += 1
        self._hooks = [
            slot.param.register_post_accumulate_grad_hook(
                functools.partial(self._on_gradient, slot)
            )  # type: ignore[no-untyped-call]
            for slot in self._slots
        ]

    def _current(self, slot: Slot) -> Slot:
        """The slot that a rebuild has put in the place of this one."""
        if slot.bucket in self._buckets:
            return slot
        return next(other for other in self._slots if other.param is slot.param)

    def _item(self, slot: Slot) -> Item:
        param = slot.param
        if param.is_cuda and gpu.refusal:
            raise ValueError(gpu.refusal)
        if (param.real if param.is_complex() else param).dtype not in DTYPES:
            raise ValueError(f"{slot.name!r} is {param.dtype}, which collectives do not support")
        group = self._group_of.get(id(param))
        return Item(param.numel(), param.element_size(), (param.dtype, param.device), group)

    def _plan(self, active: world.World, index: int, bucket: Bucket) -> _core.Plan:
        name = f"DistributedOptimizer.{self._number}.{self._generation}.bucket.{index}"
        strides = [slot.view.stride() for slot in bucket.slots]
        if not all(slot.view.is_contiguous() for slot in bucket.slots):
            # Ranks whose gradients lie differently in memory must never be added.
            name += f".{zlib.crc32(repr(strides).encode()):08x}"
        prescale = postscale = 1.0
        op = self._op
        if self._predivide != 1.0:
            prescale, postscale, op = 1 / self._predivide, self._predivide / active.size, Sum
        wire = bucket.wire
        return active.engine.plan(
            name,
            DTYPES[wire.dtype],
            op,
            wire.data_ptr(),
            wire.data_ptr(),
            wire.numel(),
            prescale,
            postscale,
            wire,
        )
