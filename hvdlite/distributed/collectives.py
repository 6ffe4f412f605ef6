"""The collectives of a process group, as c10d calls them.

Every method takes the form that torch.distributed's functions and C++ use (lists of one, options),
and the short ones of `ProcessGroup` (a tensor, a root, an op). Operation k of a group is posted as
"<group>.<k>", whatever it is: ranks that call different things get an error that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hvdlite import _core
from hvdlite.distributed import arguments, spans, sparse
from hvdlite.distributed.arguments import landing, movable, one_device, reduce_op, reducible, single
from hvdlite.distributed.errors import CollectiveError
from hvdlite.distributed.point_to_point import PointToPoint
from hvdlite.distributed.work import DONE, OperationWork, SeveralWork
from hvdlite.observe import waits
from hvdlite.ops import DTYPES
from hvdlite.sites import site
from hvdlite.world.telling import last_line

Tensor = torch.Tensor

_SUM = c10d.ReduceOp.SUM
_AS_IT_IS = 0, 1.0
_posting = _core.posting


class Collectives(PointToPoint):
    """What `HvdliteProcessGroup` inherits; it provides the attributes."""

    next_name: Callable[[], str]

    def _do(
        self,
        form: str,
        opts: Any,
        kind: int,
        source: Any,
        result: Any,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor] | None = None,
        how: tuple[int, float] = _AS_IT_IS,
        root: int = 0,
        splits: Sequence[int] | None = None,
    ) -> Any:
        """Posts it; a blocking call waits for it.

        source, result: as for a posting; where they have the caller's memory, the engine reads and
        writes there. outputs: the caller's tensors for the result. inputs: for the profiler, if not
        the outputs. how: the op, and the factor of each rank's tensor.
        """
        finish = (
            None if result is None or result is outputs[0] else arguments.filling(outputs, result)
        )
        some = result if source is None else source
        if some.__class__ is tuple:
            some = some[0]
        dtype = _core.UINT8 if some is None else DTYPES[some.dtype]
        # The name is last: a refused argument takes no number.
        posting = _posting(
            *(kind, self.next_name(), True, dtype, source, result, how[0], root, how[1], 1.0),
            *(splits, None, 0, site(3)),
        )
        timeout_s = arguments.seconds(opts.timeout, self.timeout_s)
        last_line.look()
        if opts.asyncOp or waits.observed():
            span = spans.begin(self.label, form, outputs if inputs is None else inputs)
            operation = self.team.post(posting, opts.asyncOp)
            work = OperationWork(self, operation, list(outputs), finish, timeout_s, span)
            if not opts.asyncOp:
                work.wait()
            elif span is not None or finish is not None:
                work.end_alone()
            return work
        self._run(self.team.run, posting, timeout_s)
        if finish is not None:
            finish(None)
        return DONE

    def _run(self, run: Callable[..., Any], *given: Any) -> Any:
        """Has the core do an operation; None, or NotImplemented where it does not take this one."""
        try:
            failure = run(*given)
        except TimeoutError as error:
            raise self.overdue(error) from None
        if failure is not None and failure is not NotImplemented:
            raise CollectiveError(failure)
        return failure

    def _several(self, form: str, tensors: list[Tensor], method: Any, calls: Any, opts: Any) -> Any:
        """Calls the method for each tuple of arguments. tensors: all of them, for the profiler."""
        with spans.one_for_all(self.label, form, tensors) as span:
            work = SeveralWork([method(*given, opts) for given in calls], span)
        if span is not None and not opts.asyncOp:
            work.wait()
        return work

    def _pairs(
        self, form: str, method: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Any:
        """One operation for each output and its input."""
        pairs = list(zip(outputs, inputs, strict=True))
        if one_device(form, inputs):
            return self._several(form, inputs, getattr(self, method), pairs, opts)
        # In one launch. No method of NCCL's backend in Python takes them all.
        nccl = self.cuda()
        nccl._start_coalescing()
        try:
            for pair in pairs:
                getattr(nccl, method)(*pair, opts)
        finally:  # after an error, too: else all that this thread launches later would wait
            work = nccl._end_coalescing()
        return work

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if opts.__class__ is not c10d.AllreduceOptions:
            opts = _options(c10d.AllreduceOptions, opts, timeout, "reduceOp")
        tensor = single("allreduce", tensors)
        if not tensor.is_cpu:
            return self.cuda().allreduce([tensor], opts)
        if tensor.is_sparse:
            return sparse.allreduce(self, tensor, opts)
        how = reduce_op("allreduce", opts.reduceOp, tensor.dtype)
        if not opts.asyncOp and not waits.observed():
            # The short way, for ordinary tensors only.
            limit_s = arguments.seconds(opts.timeout, self.timeout_s)
            if last_line.clock() >= last_line.due:
                last_line.note()
            given = tensor, tensor, self.next_name, *how, 1.0, limit_s, site(2), math.inf
            if self._run(self.team.run_allreduce, *given) is None:
                return DONE
        values = reducible("allreduce", tensor)
        return self._do("all_reduce", opts, _core.ALLREDUCE, values, values, [tensor], how=how)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = _options(c10d.AllreduceCoalescedOptions, opts)
        if not one_device("allreduce", tensors):
            return self.cuda().allreduce_coalesced(tensors, opts)
        return self._several("all_reduce", tensors, self.allreduce, zip(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, **root: int) -> Any:
        opts = _options(c10d.BroadcastOptions, root.get("root", opts), timeout, "rootRank")
        tensor = single("broadcast", tensors)
        if not tensor.is_cpu:
            return self.cuda().broadcast([tensor], opts)
        member, flat = self._root("broadcast", opts), movable("broadcast", tensor)
        return self._do("broadcast", opts, _core.BROADCAST, flat, flat, [tensor], root=member)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = _SUM, timeout: Any = None, **root: int
    ) -> Any:
        opts = _options(c10d.ReduceOptions, root.get("root", opts), timeout, "rootRank")
        if op is not _SUM:
            opts.reduceOp = op
        tensor = single("reduce", tensors)
        if not tensor.is_cpu:
            return self.cuda().reduce([tensor], opts)
        member = self._root("reduce", opts)
        how = reduce_op("reduce", opts.reduceOp, tensor.dtype)
        values = reducible("reduce", tensor)
        result = values if self.team.rank == member else None  # the others' tensors stay
        return self._do("reduce", opts, _core.REDUCE, values, result, [tensor], None, how, member)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = _options(c10d.AllgatherOptions, opts)
        tensor, parts = single("allgather", inputs), arguments.listed("allgather", outputs)
        if not one_device("allgather", [tensor, *parts]):
            return self.cuda().allgather([parts], [tensor], opts)
        arguments.check_parts("allgather", parts, self.team.size, tensor.dtype)
        flat = movable("allgather", tensor)
        flats = tuple(landing("allgather", part) for part in parts)
        arguments.check_sizes("allgather", [flats[self.team.rank]], flat)
        rest = flats, parts, [tensor], _AS_IT_IS, 0, arguments.uneven(flats)
        return self._do("all_gather", opts, _core.ALLGATHER_INTO, flat, *rest)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = _options(c10d.AllgatherOptions, opts)
        if not tensor.is_cpu:
            return self.cuda()._allgather_base(output, tensor, opts)
        form = "all_gather_into_tensor"
        arguments.check_whole(form, "output", output, tensor, self.team.size)
        flats = movable(form, tensor), landing(form, output)
        return self._do("_all_gather_base", opts, _core.ALLGATHER_INTO, *flats, [output], [tensor])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        opts = _options(c10d.AllgatherOptions, opts)
        return self._pairs("_all_gather_base", "_allgather_base", outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """output_lists: by member, a tensor for each input."""
        opts = _options(c10d.AllgatherOptions, opts)
        if not one_device("allgather_coalesced", inputs):
            return self.cuda().allgather_coalesced(output_lists, inputs, opts)
        if len(output_lists) != self.team.size:
            raise ValueError(
                f"allgather_coalesced: output lists should be equal to world size "
                f"{self.team.size}, got {len(output_lists)}"
            )
        pairs = list(zip(zip(*output_lists, strict=True), inputs, strict=True))
        return self._several("all_gather", inputs, self.allgather, pairs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(c10d.GatherOptions, opts, timeout, "rootRank")
        tensor = single("gather", inputs)
        parts = self._parts_of_root("gather", opts, outputs, tensor.dtype)
        if not tensor.is_cpu:
            return self.cuda().gather([parts] if parts else [], [tensor], opts)
        flat = movable("gather", tensor)
        flats = tuple(landing("gather", part) for part in parts)
        arguments.check_sizes("gather", flats, flat)
        rest = flats or None, parts, [tensor]
        return self._do("gather", opts, _core.GATHER, flat, *rest, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(c10d.ScatterOptions, opts, timeout, "rootRank")
        output = single("scatter", outputs)
        parts = self._parts_of_root("scatter", opts, inputs, output.dtype)
        if not output.is_cpu:
            return self.cuda().scatter([output], [parts] if parts else [], opts)
        flat = landing("scatter", output)
        flats = tuple(movable("scatter", part) for part in parts)
        arguments.check_sizes("scatter", flats, flat)
        rest = flats or None, flat, [output], parts
        return self._do("scatter", opts, _core.SCATTER, *rest, root=opts.rootRank)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        opts = _options(c10d.ReduceScatterOptions, opts, timeout, "reduceOp")
        form = "reduce_scatter"
        output, parts = single(form, outputs), arguments.listed(form, inputs)
        if not one_device(form, [output, *parts]):
            return self.cuda().reduce_scatter([output], [parts], opts)
        arguments.check_parts(form, parts, self.team.size, output.dtype)
        how = reduce_op(form, opts.reduceOp, output.dtype)
        flats = tuple(reducible(form, part).view(-1) for part in parts)
        flat = landing(form, output)
        arguments.check_sizes(form, [flats[self.team.rank]], flat)
        rest = flat, [output], parts, how, 0, arguments.uneven(flats)
        return self._do(form, opts, _core.REDUCESCATTER, flats, *rest)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = _options(c10d.ReduceScatterOptions, opts, None, "reduceOp")
        if not tensor.is_cpu:
            return self.cuda()._reduce_scatter_base(output, tensor, opts)
        form = "reduce_scatter_tensor"
        arguments.check_whole(form, "input", tensor, output, self.team.size)
        how = reduce_op(form, opts.reduceOp, output.dtype)
        flat = reducible(form, tensor).view(-1)
        into = landing(form, output), [output], [tensor], how
        return self._do("_reduce_scatter_base", opts, _core.REDUCESCATTER, flat, *into)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        opts = _options(c10d.ReduceScatterOptions, opts)
        form = "_reduce_scatter_base"
        return self._pairs(form, form, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        opts = _options(c10d.AllToAllOptions, opts)
        given = list(output_split_sizes), list(input_split_sizes)
        if not tensor.is_cpu:
            return self.cuda().alltoall_base(output, tensor, *given, opts)
        form, size = "all_to_all_single", self.team.size
        arguments.same_dtype(form, [output], tensor.dtype)
        received = arguments.counts(form, "output", given[0], output, size)
        sent = arguments.counts(form, "input", given[1], tensor, size)
        flats = movable(form, tensor), landing(form, output)
        # They travel always, as other ranks may give splits where this one gives none.
        splits = (*_elements(tensor, flats[0], sent), *_elements(output, flats[1], received))
        rest = *flats, [output], [tensor], _AS_IT_IS, 0, splits
        return self._do("all_to_all", opts, _core.ALLTOALL_INTO, *rest)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = _options(c10d.AllToAllOptions, opts)
        form, size = "all_to_all", self.team.size
        if not one_device(form, [*outputs, *inputs]):
            return self.cuda().alltoall(outputs, inputs, opts)
        arguments.check_parts(form, inputs, size, inputs[0].dtype if inputs else torch.float32)
        arguments.check_parts(form, outputs, size, inputs[0].dtype)
        sources = tuple(movable(form, tensor) for tensor in inputs)
        results = tuple(landing(form, output) for output in outputs)
        splits = (*map(len, sources), *map(len, results))
        rest = sources, results, outputs, inputs, _AS_IT_IS, 0, splits
        return self._do(form, opts, _core.ALLTOALL_INTO, *rest)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(c10d.BarrierOptions, opts, timeout)
        if opts.device is not None and opts.device.type == "cuda":
            return self.cuda().barrier(opts)
        return self._do("barrier", opts, _core.BARRIER, None, None, [])

    def _root(self, form: str, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self.team.size:
            raise ValueError(f"{form}: there is no rank {root} in a group of {self.team.size}")
        return root

    def _parts_of_root(
        self, form: str, opts: Any, given: Any, dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """The tensors that the root alone passes, one for each rank."""
        if self._root(form, opts) == self.team.rank:
            parts: Sequence[Tensor] = arguments.listed(form, given)
            arguments.check_parts(form, parts, self.team.size, dtype)
            return parts
        if given and arguments.listed(form, given):
            raise ValueError(f"{form}: only the root passes a list of tensors, one for each rank")
        return []


def _elements(tensor: Tensor, flat: Tensor, rows: Sequence[int]) -> list[int]:
    """Elements of the flat tensor in so many rows of a tensor."""
    count = tensor.size(0) if tensor.dim() else 1
    row = flat.numel() // count if count else 0
    return [number * row for number in rows]


def _options(kind: Callable[[], Any], given: Any, timeout: Any = None, field: str = "") -> Any:
    """The options of a call that may have got those of this field, or a timeout, in their place."""
    if given is not None and hasattr(given, "asyncOp"):
        return given
    opts = kind()
    if given is not None and field:
        setattr(opts, field, given)
    elif given is not None:
        timeout = given
    if timeout is not None:
        opts.timeout = timeout
    return opts
