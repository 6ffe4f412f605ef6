"""Collectives on a process group of torch, as hvdlite defines them.

Everything here runs on the current stream of the queue: `work.wait()` makes that stream wait, not
the host (with NCCL; Gloo, which stands in for it in tests, has no streams and blocks). All tensors
are contiguous and on the group's device.

- Data that is moved and not reduced travels as bytes, so every dtype works.
- NCCL has no int16 and no logic: int16 is reduced as int32, bool as uint8 by Max (or), Min (and).
- float16 and bfloat16 are added in 16 bit: NCCL rounds after every addition.
- Its own Average is not used: the sum is multiplied once, by 1/n and the postscale factor together,
  as on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOp,
    ReduceScatterOptions,
)

from hvdlite import _core
from hvdlite.gpu.backend import Backend, Work
from hvdlite.gpu.transfer import Transfer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hvdlite.gpu.devices import Devices

_REDUCE_OPS = {
    _core.AVERAGE: ReduceOp.SUM,
    _core.SUM: ReduceOp.SUM,
    _core.MIN: ReduceOp.MIN,
    _core.MAX: ReduceOp.MAX,
    _core.PRODUCT: ReduceOp.PRODUCT,
}
_BOOL_OPS = {
    _core.SUM: ReduceOp.MAX,
    _core.MAX: ReduceOp.MAX,
    _core.PRODUCT: ReduceOp.MIN,
    _core.MIN: ReduceOp.MIN,
}


class Group:
    """A process group of torch with the members of a team, in their order."""

    def __init__(
        self,
        backend: Backend,
        rank: int,
        size: int,
        device: torch.device,
        store: Store | None = None,
    ) -> None:
        self._backend: Backend | None = backend
        # The process group asks it for as long as it lives.
        self._store = store
        self.rank = rank
        self.size = size
        self.device = device

    def another(self, devices: Devices, name: str) -> Group:
        """A further communicator of the same members, which all call it; blocks.

        name: the same on all members, another one at each call.
        """
        if self._store is None:
            return Group(self._live(), self.rank, self.size, self.device)
        store = PrefixStore(name, self._store)
        backend = devices.group(store, self.rank, self.size, self.device)
        return Group(backend, self.rank, self.size, self.device, store)

    def start_sum(self, tensor: torch.Tensor, average: bool) -> Work:
        """Starts to add up contiguous floats in place, behind the current stream and beside it;
        `wait` of what it returns makes the then current stream wait. average: divides by the size.
        """
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.AVG if average else ReduceOp.SUM)
        return self._live().allreduce([tensor], options)

    def run(self, transfer: Transfer) -> torch.Tensor:
        """Queues a transfer's work on the current stream; the result, on the tensor's device.

        A tensor of another device than the group's is copied there and back: the members could not
        agree on a group per device, which each of them numbers in its own way.
        """
        given, result = transfer.tensor, transfer.result
        assert given is not None
        tensor = given.to(self.device)
        if transfer.gathers:
            return _GATHERINGS[transfer.request.kind](self, tensor, transfer).to(given.device)
        assert result is not None
        values = result
        if result.device != self.device:
            values = torch.empty_like(result, device=self.device)
        _FILLINGS[transfer.request.kind](self, tensor, values, transfer.request)
        if values is not result:
            result.copy_(values)
        return result

    def _allreduce(
        self, tensor: torch.Tensor, result: torch.Tensor, request: _core.Posting
    ) -> None:
        if result is not tensor:
            result.copy_(tensor)
        self.allreduce_(result, request)

    def _broadcast(
        self, tensor: torch.Tensor, result: torch.Tensor, request: _core.Posting
    ) -> None:
        if self.rank == request.root and result is not tensor:
            result.copy_(tensor)
        self.broadcast_(result, request.root)

    def _allgather(self, tensor: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        assert transfer.counts is not None
        return self.allgather(tensor, transfer.counts)

    def _alltoall(self, tensor: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        splits = transfer.request.splits
        assert transfer.counts is not None
        assert splits is not None
        sent = list(splits) if isinstance(splits, tuple) else splits.tolist()
        return self.alltoall(tensor, sent, transfer.counts)

    def allreduce_(self, tensor: torch.Tensor, request: _core.Posting) -> None:
        """In place."""
        if not tensor.numel():
            return
        _scale_(tensor, 1, request.prescale)
        values = _reducible(tensor)
        options = AllreduceOptions()
        options.reduceOp = _reduce_op(tensor, request.op)
        self._live().allreduce([values], options).wait()
        self._finish(tensor, values, request)

    def broadcast_(self, tensor: torch.Tensor, root: int) -> None:
        """In place: the root's values."""
        if tensor.numel():
            options = BroadcastOptions()
            options.rootRank = root
            self._live().broadcast([_bytes(tensor)], options).wait()

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """rows: by member, the first dimension of what it gives."""
        result = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        if not result.numel():
            return result
        if len(set(rows)) == 1:
            self._live()._allgather_base(_bytes(result), _bytes(tensor)).wait()
            return result
        # One after the other: padding all to the longest may need many times the memory.
        ends = list(accumulate(rows))
        for root, (end, count) in enumerate(zip(ends, rows, strict=True)):
            part = result[end - count : end]
            if root == self.rank:
                part.copy_(tensor)
            self.broadcast_(part, root)
        return result

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """sent, received: rows to and from each member; the result has them in member order."""
        result = tensor.new_empty((sum(received), *tensor.shape[1:]))
        row_bytes = tensor.element_size() * tensor.shape[1:].numel()
        if row_bytes:
            self._live().alltoall_base(
                _bytes(result).view(-1, row_bytes),
                _bytes(tensor[: sum(sent)]).view(-1, row_bytes),
                list(received),
                list(sent),
                AllToAllOptions(),
            ).wait()
        return result

    def reducescatter(
        self, tensor: torch.Tensor, result: torch.Tensor, request: _core.Posting
    ) -> None:
        """result: for this member's rows, which are `_core`'s: the first get one more."""
        if not tensor.numel():
            return
        rows, row = tensor.shape[0], tensor.shape[1:]
        base, longer = divmod(rows, self.size)
        values = tensor
        if longer:
            # Equal shares, the shorter ones with a row of zeros at their end.
            values = tensor.new_zeros((self.size, base + 1, *row))
            middle = longer * (base + 1)
            values[:longer].copy_(tensor[:middle].view(longer, base + 1, *row))
            values[longer:, :base].copy_(tensor[middle:].view(self.size - longer, base, *row))
        elif request.prescale != 1.0:
            values = tensor.clone()
        _scale_(values, 1, request.prescale)
        values = _reducible(values)
        share = values.new_empty(values.numel() // self.size)
        options = ReduceScatterOptions()
        options.reduceOp = _reduce_op(tensor, request.op)
        self._live()._reduce_scatter_base(share, values.view(-1), options).wait()
        self._finish(result, share[: result.numel()].view(result.shape), request)

    def end(self) -> None:
        """Ends it on this rank, with any work under way. Not collective. Safe to call twice."""
        backend, self._backend = self._backend, None
        if backend is not None:
            # Before torch 2.6 it has another name.
            end = getattr(backend, "abort", None) or getattr(backend, "_abort", None)
            if end is not None:
                end()
        self._store = None

    def _live(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the process group was ended")
        return self._backend

    def _finish(self, result: torch.Tensor, values: torch.Tensor, request: _core.Posting) -> None:
        """Puts the reduced values into the result, scaled."""
        if values.data_ptr() != result.data_ptr():
            result.copy_(values)
        _scale_(result, self.size if request.op == _core.AVERAGE else 1, request.postscale)


# The kinds that a group can run: those that fill a result, those that gather. Others are staged.
_FILLINGS = {
    _core.ALLREDUCE: Group._allreduce,
    _core.BROADCAST: Group._broadcast,
    _core.REDUCESCATTER: Group.reducescatter,
}
_GATHERINGS = {
    _core.ALLGATHER: Group._allgather,
    _core.ALLTOALL: Group._alltoall,
}


def has_collective(request: _core.Posting) -> bool:
    """Whether a group can do it."""
    kinds = _GATHERINGS if _core.KINDS[request.kind].gathers else _FILLINGS
    return request.kind in kinds and request.op != _core.ADASUM


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _reducible(tensor: torch.Tensor) -> torch.Tensor:
    """The values as the group can reduce them: the same memory but for int16."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return tensor.int() if tensor.dtype is torch.int16 else tensor


def _reduce_op(tensor: torch.Tensor, op: int) -> ReduceOp:
    return ReduceOp((_BOOL_OPS if tensor.dtype is torch.bool else _REDUCE_OPS)[op])


def _scale_(values: torch.Tensor, divisor: int, factor: float) -> None:
    """As the core's kernels do: floats by one factor. Integers: divided toward zero, multiplied in
    double and cut."""
    if values.is_floating_point():
        if divisor != 1 or factor != 1.0:
            values.mul_(factor / divisor)
        return
    if divisor != 1:
        values.div_(divisor, rounding_mode="trunc")
    if factor != 1.0:
        # By way of int64, so that what does not fit wraps as on the CPU.
        values.copy_(values.double().mul_(factor).long())
