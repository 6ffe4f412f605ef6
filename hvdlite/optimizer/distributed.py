"""DistributedOptimizer: reduces the gradients of an optimizer over all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdlite.compression import Compression, Compressor
from hvdlite.ops import Adasum, Average, ReduceOp
from hvdlite.optimizer import arguments, faults
from hvdlite.optimizer.adasum import DeltaOptimizer, Deltas
from hvdlite.optimizer.buckets.bucket import Combining
from hvdlite.optimizer.buckets.slot import Form
from hvdlite.optimizer.checks.other_reducers import require_no_other_reducer
from hvdlite.optimizer.gradient_optimizer import Calls, GradientOptimizer
from hvdlite.optimizer.micro_batches import require_possible
from hvdlite.optimizer.overlap.watching import Watching
from hvdlite.optimizer.periodic_check import PeriodicCheck
from hvdlite.optimizer.reducer import Reducer
from hvdlite.optimizer.sharding import clip_guard
from hvdlite.optimizer.sharding.elementwise import require_shardable
from hvdlite.optimizer.sharding.optimizer import ShardedOptimizer
from hvdlite.optimizer.sharding.part_states import PartStates
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.optimizer.sharding.update import Update
from hvdlite.optimizer.together import release
from hvdlite.optimizer.wrapping import Wrapper, wrap
from hvdlite.shared import is_shared
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, included


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    check_start: bool = True,
    shard: bool | str = False,
    free_gradients: bool = False,
    overlap_forward: torch.nn.Module | None = None,
) -> Any:
    """Makes an optimizer reduce its gradients over all ranks, while backward still runs.

    When a `backward()` that communicates returns, `.grad` holds the reduced gradients on every rank
    (added in the order of the ranks within a host, whatever the timing), so clipping and GradScaler
    work as in one process. Every rank makes its distributed optimizers in the same order, over the
    same parameters, and calls `backward` and `step` equally often; a rank whose backward reaches no
    parameter takes part in `step`. A hook on a parameter that changes it or removes its gradient
    during backward is an error (but with one DistributedOptimizer per parameter, hooks registered
    afterwards may make steps). Gradients stay in shared buckets from step to step: to keep a tensor
    that shares memory with `.grad` (`detach()`, a view), clone it.

    With op=Adasum the gradients stay this rank's own. `step` makes the optimizer's step with them,
    and combines by Adasum the change of each parameter (the delta from its former value). Every
    rank calls `step` equally often, and nothing else is collective.

    Args:
        optimizer: Any torch optimizer. It shares its state, options and parameter groups with the
            result for good.
        named_parameters: `model.named_parameters()`: names for error messages, with which the ranks
            also check that they have the same parameters in the same order. By default those that
            the optimizer was made with, as `torch.optim.SGD(model.named_parameters())`.
        compression: Compression.none, .fp16 or .bf16: the form in which gradients (or deltas)
            travel.
        backward_passes_per_step: Gradients are reduced every N backward passes; their sum is not
            divided by N. It has no effect with Adasum, where no backward communicates. With
            HVDLITE_DETERMINISTIC=virtual:V it is `hvd.virtual_micro_batches()`, and an Average is
            that of all V micro-batches.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: With Average: divides by this before adding, and by size / this
            afterwards.
        num_groups: The older form of a number of `groups`.
        groups: Gradients to reduce together: lists of parameters, or the number of groups to form.
            By default they are grouped by size. It has no effect with Adasum, which combines each
            delta by itself.
        sparse_as_dense: Sparse gradients travel as dense ones, in the buckets. Otherwise the ranks'
            rows are gathered. In either case `.grad` is sparse on every rank and has the rows of
            all of them; but a parameter for which some rank had a dense gradient has dense ones
            from then on.
        process_set: The ranks that take part. On other ranks the result has the same class and
            methods, and communicates nothing.
        check_start: Whether the ranks compare their parameters, and the optimizer's state and
            options, in the first reduction. If they differ, rank 0 warns, or with HVDLITE_STRICT=1
            all ranks raise an error. They also do if the ranks only have the values in another
            order.
        shard: True: each rank owns a part of every bucket. It gets the reduced gradients and keeps
            the optimizer's state of its part only, and updates its part, with the same bits as an
            unsharded step; then every rank gets the whole parameters again. "host": the same among
            the ranks of each host. False: every rank does all of this; only parameters of
            `share_parameters` are updated once per host, each element by one of its ranks, which
            alone has its state.
        free_gradients: Whether `step` ends like `zero_grad`, with every `.grad` None, and returns
            the gradients' host memory to the system until the next backward. That costs page faults
            in each step.
        overlap_forward: The model. `step` may then return, with `shard`, before the parts of other
            ranks have arrived. A read of a parameter through the model or its modules (forward,
            attributes, `parameters()`, `state_dict()`) waits for it. Anything that holds parameters
            otherwise sees old values until then: call `optimizer.wait_for_parameters()` first.

    With `shard`, `.grad` is None when a communicating `backward()` returns;
    `optimizer.sharded_grad(param)` is this rank's part of a gradient. torch's own element-wise
    optimizers (SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Rprop, Adagrad, Adadelta, ASGD) are
    cut anywhere, and so are classes that set `hvdlite_elementwise = True`; any other class gets
    whole parameters, distributed by size. Parameters with sparse gradients are not divided.
    `hvd.join` is an error.

    Returns:
        An instance of the optimizer's own class, with the additional methods synchronize,
        skip_synchronize, no_sync, set_backward_passes_per_step, set_weight and wait_for_parameters;
        with `shard` or shared parameters also sharded_grad.

    Raises:
        ValueError: Names that are no pairs, duplicate or missing; fewer than one pass per step;
            another op; predivide with an op other than Average; a parameter in two groups; a
            process set that is not registered; shard with Adasum, LBFGS or differentiable=True;
            free_gradients with Adasum; overlap_forward without shard, or a model that has none of
            the parameters. With HVDLITE_DETERMINISTIC=virtual:V: another backward_passes_per_step,
            Adasum, compression, gradient_predivide_factor, sparse_as_dense, shard, parameters that
            are shared or on a GPU, or a process set whose size does not divide V.

        RuntimeError: DDP or FSDP has wrapped the model; if it does so later, the first reduction
            raises this.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> model(torch.randn(4, 2)).square().mean().backward()  # reduces .grad
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, Wrapper):
        raise ValueError("this optimizer is already distributed")
    op = arguments.checked_op(op, gradient_predivide_factor)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = arguments.checked_names(named_parameters, lambda: optimizer.param_groups)
    combining = Combining(
        op,
        float(gradient_predivide_factor),
        arguments.checked_compression(compression),
        arguments.groups_by_id(groups, num_groups, params),
    )
    passes = arguments.checked_passes(backward_passes_per_step)
    shard = arguments.checked_shard(shard, op)
    frees = arguments.checked_free(free_gradients, op)
    model = arguments.checked_overlap(overlap_forward, shard, params)
    is_member = included("DistributedOptimizer", process_set)
    require_possible(params, process_set, combining, passes, sparse_as_dense, shard)
    # On other ranks the optimizer is the wrapped one.
    divides = is_member and (bool(shard) or any(map(is_shared, params)))
    if divides:
        require_shardable(optimizer)
    if is_member:
        if (process_set.size() or 1) > 1:
            require_no_other_reducer(params)
        release(params)
        clip_guard.release(params)
    kind = type(optimizer).__name__
    check = PeriodicCheck(process_set, names.of)
    own: dict[str, Any] = {"_hvdlite_check": check}
    if op is Adasum:
        own["_hvdlite_deltas"] = Deltas(
            *(lambda: optimizer.param_groups, names, combining, kind, process_set, check_start),
            besides=check.besides,
            passes=passes,
        )
        return _wrapped(optimizer, DeltaOptimizer, own)
    shards = update = None
    if divides:
        shards = Shards(type(optimizer), shard, process_set)
    reducer = Reducer(
        lambda: optimizer.param_groups,
        names,
        combining,
        passes=passes,
        first_form=_first_form(optimizer, sparse_as_dense),
        sparse_as_dense=bool(sparse_as_dense),
        optimizer=kind,
        process_set=process_set,
        check_start=check_start,
        besides=check.besides,
        shards=shards,
        frees=frees,
    )
    own |= {"_hvdlite_reducer": reducer, "_hvdlite_calls": Calls()}
    if shards is None:
        result = _wrapped(optimizer, GradientOptimizer, own)
    else:
        states = PartStates(shards, optimizer, names.of)
        update = Update(shards, states, Watching(model) if model is not None else None)
        own |= {"_hvdlite_update": update, "_hvdlite_states": states}
        result = _wrapped(optimizer, ShardedOptimizer, own)
        if shard:
            clip_guard.guard(params, result)
    weakref.finalize(result, _end, reducer, update).atexit = False
    return result


def _wrapped(optimizer: torch.optim.Optimizer, kind: type[Wrapper], own: dict[str, Any]) -> Any:
    result = wrap(optimizer, kind, **own)
    check: PeriodicCheck = own["_hvdlite_check"]
    check.look_at(result)
    faults.put_into(result, check.name_of)
    return result


def _end(reducer: Reducer, update: Update | None) -> None:
    """The optimizer is deleted."""
    try:
        if update is not None:
            update.wait_for_parameters()
    finally:
        reducer.detach()


def _first_form(optimizer: torch.optim.Optimizer, sparse_as_dense: bool) -> Form:
    """The assumed form of a parameter's gradients before the first one has come."""
    takes_rows_only = isinstance(optimizer, torch.optim.SparseAdam)
    return Form.SPARSE if takes_rows_only and not sparse_as_dense else Form.UNKNOWN
