"""The collectives of a process group, as c10d calls them.

Every method takes the form that torch.distributed's functions and C++ use (lists of one, options),
and the short ones of `ProcessGroup` (a tensor, a root, an op). Operation k of a group is posted as
"<group>.<k>", whatever it is: ranks that call different things get an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from hvdlite.distributed import arguments, postings, spans, sparse
from hvdlite.distributed.arguments import one_device, same_dtype, single
from hvdlite.distributed.errors import CollectiveError, OperationTimeoutError
from hvdlite.distributed.work import DONE, OperationWork, SeveralWork
from hvdlite.observe import waits
from hvdlite.sites import site
from hvdlite.world.teams.team import Team
from hvdlite.world.telling import last_line

Tensor = torch.Tensor

_SUM = ReduceOp.SUM


class Collectives:
    """What `HvdliteProcessGroup` inherits; it provides the attributes."""

    team: Team
    timeout_s: float
    label: str
    next_name: Callable[[], str]
    cuda: Callable[[], Any]
    overdue: Callable[[TimeoutError], OperationTimeoutError]

    def _start(
        self,
        form: str,
        posted: postings.Posted,
        opts: Any,
        outputs: list[Tensor],
        inputs: Sequence[Tensor] | None = None,
    ) -> Any:
        """Posts it; a blocking call waits for it. inputs: for the profiler, if not the outputs."""
        posting, finish = posted
        timeout_s = arguments.seconds(opts.timeout, self.timeout_s)
        asynchronous = opts.asyncOp
        last_line.look()
        if asynchronous or waits.observed():
            return self._observed(form, posting, finish, timeout_s, asynchronous, outputs, inputs)
        try:
            failure = self.team.run(posting, timeout_s)
        except TimeoutError as error:
            raise self.overdue(error) from None
        if failure is not None:
            raise CollectiveError(failure)
        if finish is not None:
            finish(None)
        return DONE

    def _observed(
        self,
        form: str,
        posting: Any,
        finish: Any,
        timeout_s: float,
        asynchronous: bool,
        outputs: list[Tensor],
        inputs: Sequence[Tensor] | None,
    ) -> Any:
        span = None
        if spans.needed():
            span = spans.begin(f"{self.label}:{form}", outputs if inputs is None else inputs)
        operation = postings.post(self.team, posting, asynchronous)
        work = OperationWork(self, operation, outputs, finish, timeout_s, span)
        if not asynchronous:
            work.wait()
        elif span is not None or finish is not None:
            work.end_alone()
        return work

    def _several(
        self, form: str, tensors: Sequence[Tensor], opts: Any, start: Callable[[], list[Any]]
    ) -> SeveralWork:
        """Operations that one call starts. tensors: all of them, for the profiler."""
        if not spans.enabled():
            return SeveralWork(start())
        span = spans.begin(f"{self.label}:{form}", tensors)
        with spans.one_for_all():
            work = SeveralWork(start(), span)
        if not opts.asyncOp:
            work.wait()
        return work

    def _allreduced(self, tensor: Tensor, opts: Any) -> bool:
        """The short way of a blocking call, for ordinary tensors only. Whether it is done."""
        op, factor = arguments.reduce_op("allreduce", opts.reduceOp, tensor.dtype)
        timeout_s = arguments.seconds(opts.timeout, self.timeout_s)
        try:
            failure = self.team.run_allreduce(
                *(tensor, tensor, self.next_name, op, factor, 1.0, timeout_s, site(3)),
                last_line.due,
            )
        except TimeoutError as error:
            raise self.overdue(error) from None
        if failure is NotImplemented:
            return False
        if failure is not None:
            raise CollectiveError(failure)
        return True

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if opts.__class__ is not AllreduceOptions:
            opts = _options(AllreduceOptions, opts, timeout, op=True)
        tensor = tensors if isinstance(tensors, Tensor) else single("allreduce", tensors)
        if not tensor.is_cpu:
            return self.cuda().allreduce([tensor], opts)
        if tensor.is_sparse:
            return sparse.allreduce(self, tensor, opts)
        if not opts.asyncOp and not waits.observed() and self._allreduced(tensor, opts):
            return DONE
        posted = postings.allreduce(self.next_name, tensor, opts.reduceOp)
        return self._start("all_reduce", posted, opts, [tensor])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = _options(AllreduceCoalescedOptions, opts, None)
        if not one_device("allreduce", tensors):
            return self.cuda().allreduce_coalesced(tensors, opts)
        one = _like_allreduce(opts)
        return self._several(
            *("all_reduce", tensors, opts),
            lambda: [self.allreduce(tensor, one) for tensor in tensors],
        )

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, **root: int) -> Any:
        opts = _options(BroadcastOptions, root.get("root", opts), timeout, root=True)
        tensor = tensors if isinstance(tensors, Tensor) else single("broadcast", tensors)
        if not tensor.is_cpu:
            return self.cuda().broadcast([tensor], opts)
        posted = postings.broadcast(self.next_name, tensor, self._root("broadcast", opts))
        return self._start("broadcast", posted, opts, [tensor])

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = _SUM, timeout: Any = None, **root: int
    ) -> Any:
        opts = _options(ReduceOptions, root.get("root", opts), timeout, root=True)
        if op is not _SUM:
            opts.reduceOp = op
        tensor = tensors if isinstance(tensors, Tensor) else single("reduce", tensors)
        if not tensor.is_cpu:
            return self.cuda().reduce([tensor], opts)
        member = self._root("reduce", opts)
        posted = postings.reduce(self.next_name, tensor, member, self.team.rank, opts.reduceOp)
        return self._start("reduce", posted, opts, [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = _options(AllgatherOptions, opts, None)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        tensor, parts = single("allgather", inputs), single("allgather", outputs)
        if not one_device("allgather", [tensor, *parts]):
            return self.cuda().allgather(outputs, inputs, opts)
        self._check_parts("allgather", parts, tensor.dtype)
        posted = postings.allgather(self.next_name, parts, tensor, self.team.rank)
        return self._start("all_gather", posted, opts, list(parts), [tensor])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = _options(AllgatherOptions, opts, None)
        if not tensor.is_cpu:
            return self.cuda()._allgather_base(output, tensor, opts)
        same_dtype("all_gather_into_tensor", [output], tensor.dtype)
        if output.numel() != tensor.numel() * self.team.size:
            raise ValueError(
                f"all_gather_into_tensor: the output has {output.numel()} elements, expected "
                f"{self.team.size} times the {tensor.numel()} of the input"
            )
        posted = postings.allgather_single(self.next_name, output, tensor)
        return self._start("_all_gather_base", posted, opts, [output], [tensor])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        opts = _options(AllgatherOptions, opts, None)
        if not one_device("all_gather_into_tensor", inputs):
            return _coalesced(self.cuda(), "_allgather_base", outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._several(
            *("_all_gather_base", inputs, opts),
            lambda: [self.all_gather_single(*pair, opts) for pair in pairs],
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """output_lists: by member, a tensor for each input."""
        opts = _options(AllgatherOptions, opts, None)
        if not one_device("allgather_coalesced", inputs):
            return self.cuda().allgather_coalesced(output_lists, inputs, opts)
        if len(output_lists) != self.team.size:
            raise ValueError(
                f"allgather_coalesced: output lists should be equal to world size "
                f"{self.team.size}, got {len(output_lists)}"
            )
        by_input = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
        return self._several(
            *("all_gather", inputs, opts),
            lambda: [self.allgather([by_input[i]], [inputs[i]], opts) for i in range(len(inputs))],
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(GatherOptions, opts, timeout, root=True)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        tensor = single("gather", inputs)
        if not tensor.is_cpu:
            return self.cuda().gather(outputs, inputs, opts)
        team, root = self.team, self._root("gather", opts)
        parts: list[Tensor] = []
        if team.rank == root:
            parts = single("gather", outputs)
            self._check_parts("gather", parts, tensor.dtype)
        elif outputs and outputs[0]:
            raise ValueError("gather: only the root passes tensors for the result")
        posted = postings.gather(self.next_name, parts, tensor, root, team.rank)
        return self._start("gather", posted, opts, list(parts), [tensor])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(ScatterOptions, opts, timeout, root=True)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        output = single("scatter", outputs)
        if not output.is_cpu:
            return self.cuda().scatter(outputs, inputs, opts)
        team, root = self.team, self._root("scatter", opts)
        parts: list[Tensor] = []
        if team.rank == root:
            parts = single("scatter", inputs)
            self._check_parts("scatter", parts, output.dtype)
        elif inputs and inputs[0]:
            raise ValueError("scatter: only the root passes tensors to send")
        posted = postings.scatter(self.next_name, output, parts, root, team.rank)
        return self._start("scatter", posted, opts, [output], parts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        opts = _options(ReduceScatterOptions, opts, timeout, op=True)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        output, parts = single("reduce_scatter", outputs), single("reduce_scatter", inputs)
        if not one_device("reduce_scatter", [output, *parts]):
            return self.cuda().reduce_scatter(outputs, inputs, opts)
        self._check_parts("reduce_scatter", parts, output.dtype)
        rank = self.team.rank
        if parts[rank].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: this rank's part has {parts[rank].numel()} elements, its output "
                f"{output.numel()}"
            )
        posted = postings.reduce_scatter(self.next_name, output, parts, opts.reduceOp)
        return self._start("reduce_scatter", posted, opts, [output], parts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = _options(ReduceScatterOptions, opts, None, op=True)
        if not tensor.is_cpu:
            return self.cuda()._reduce_scatter_base(output, tensor, opts)
        same_dtype("reduce_scatter_tensor", [output], tensor.dtype)
        size = self.team.size
        if tensor.numel() != output.numel() * size:
            raise ValueError(
                f"reduce_scatter_tensor: the input has {tensor.numel()} elements, expected {size} "
                f"times the {output.numel()} of the output"
            )
        posted = postings.reduce_scatter_single(self.next_name, output, tensor, opts.reduceOp)
        return self._start("_reduce_scatter_base", posted, opts, [output], [tensor])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        opts = _options(ReduceScatterOptions, opts, None)
        if not one_device("reduce_scatter_tensor", inputs):
            return _coalesced(self.cuda(), "_reduce_scatter_base", outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._several(
            *("_reduce_scatter_base", inputs, opts),
            lambda: [self.reduce_scatter_single(*pair, opts) for pair in pairs],
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        opts = _options(AllToAllOptions, opts, None)
        if not tensor.is_cpu:
            splits = list(output_split_sizes), list(input_split_sizes)
            return self.cuda().alltoall_base(output, tensor, *splits, opts)
        same_dtype("all_to_all_single", [output], tensor.dtype)
        size = self.team.size
        form = "all_to_all_single"
        received = arguments.counts(form, "output", output_split_sizes, output, size)
        sent = arguments.counts(form, "input", input_split_sizes, tensor, size)
        posted = postings.alltoall_single(self.next_name, output, tensor, received, sent)
        return self._start("all_to_all", posted, opts, [output], [tensor])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = _options(AllToAllOptions, opts, None)
        if not one_device("all_to_all", [*outputs, *inputs]):
            return self.cuda().alltoall(outputs, inputs, opts)
        self._check_parts("all_to_all", inputs, inputs[0].dtype if inputs else torch.float32)
        self._check_parts("all_to_all", outputs, inputs[0].dtype)
        posted = postings.alltoall(self.next_name, outputs, inputs)
        return self._start("all_to_all", posted, opts, list(outputs), inputs)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(BarrierOptions, opts, timeout)
        if opts.device is not None and opts.device.type == "cuda":
            return self.cuda().barrier(opts)
        return self._start("barrier", postings.barrier(self.next_name), opts, [])

    def _root(self, form: str, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self.team.size:
            raise ValueError(f"{form}: there is no rank {root} in a group of {self.team.size}")
        return root

    def _check_parts(self, form: str, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        if len(parts) != self.team.size:
            raise ValueError(
                f"{form}: a list of {len(parts)} tensors, expected {self.team.size}: one per rank"
            )
        same_dtype(form, parts, dtype)


def _coalesced(
    nccl: Any, form: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
) -> Any:
    """Several operations in one launch. No method of NCCL's backend in Python takes them all."""
    pairs = list(zip(outputs, inputs, strict=True))
    nccl._start_coalescing()
    try:
        for output, tensor in pairs:
            getattr(nccl, form)(output, tensor, opts)
    finally:  # after an error, too: else all that this thread launches later would wait
        work = nccl._end_coalescing()
    return work


def _like_allreduce(opts: Any) -> Any:
    """The options of one of several allreduces, which may be of a subclass."""
    if opts.__class__ is AllreduceOptions:
        return opts
    made = AllreduceOptions()
    made.reduceOp, made.timeout, made.asyncOp = opts.reduceOp, opts.timeout, opts.asyncOp
    return made


def _options(
    kind: Callable[[], Any], given: Any, timeout: Any, *, op: bool = False, root: bool = False
) -> Any:
    """The options of a call that may have got an op, a root or a timeout in their place."""
    if given is not None and hasattr(given, "asyncOp"):
        return given
    opts = kind()
    if op and given is not None:
        opts.reduceOp = given
    elif root and given is not None:
        opts.rootRank = given
    elif given is not None:
        timeout = given
    if timeout is not None:
        opts.timeout = timeout
    return opts
