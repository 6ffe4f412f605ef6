"""Metrics of torchmetrics, over the data of all ranks.

torchmetrics synchronizes by torch.distributed, one gather for each state, and needs a process
group. Here the states of a metric travel in one collective of hvdlite, whatever their shapes: of a
rank without data, of lists of unequal length. How they are put together is the metric's own way
(`dist_reduce_fx`). The data may be dealt unevenly, and every sample counts once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.collectives.objects import gather_results
from hvdlite.collectives.posting import internal
from hvdlite.errors import HorovodInternalError
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of

if TYPE_CHECKING:
    import torchmetrics

AnyMetric = TypeVar("AnyMetric", bound="torchmetrics.Metric | torchmetrics.MetricCollection")


def synchronized(metric: AnyMetric, process_set: ProcessSet = global_process_set) -> AnyMetric:
    """Makes `metric.compute()` return the value of all ranks' data; returns the metric.

    Every rank then calls `compute` (and `forward`, with `dist_sync_on_step`), also one that had no
    data; it blocks, one allgather for each metric. Updates send nothing.

    Args:
        metric: A metric of torchmetrics, a collection, or a metric made of others. Copies of
            it (`clone`) are synchronized too.
        process_set: The ranks whose data count.

    Raises:
        ValueError: It is nothing of torchmetrics; or when `compute` is called: this rank is no
            member.
        HorovodInternalError: When `compute` is called: the ranks have different metrics; on every
            rank.

    Example:
        On two ranks:

        >>> import torchmetrics
        >>> from hvdlite.recipes import synchronized
        >>> mean = synchronized(torchmetrics.MeanMetric())
        >>> mean.update(float(hvd.rank()))
        >>> mean.compute()
        tensor(0.5000)
    """
    import torchmetrics

    if not isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection)):
        raise ValueError(
            f"synchronized: {type(metric).__name__} is no metric or collection of torchmetrics"
        )
    for part in metric.modules():
        # One made by arithmetic on others has no states; the others are its modules.
        if isinstance(part, torchmetrics.Metric) and part._reductions:
            # What a rank has cached would keep it from the others' compute.
            part.compute_with_cache, part._computed = False, None
            part.distributed_available_fn = functools.partial(_is_distributed, process_set)
            # A partial, and no method or closure: copies of the metric get one of their own.
            part._sync_dist = functools.partial(_gather_states, part, process_set)  # type: ignore[method-assign]
    return metric


def _is_distributed(process_set: ProcessSet) -> bool:
    return world.is_initialized() and team_of("synchronized", process_set).size > 1


def _gather_states(
    metric: torchmetrics.Metric, process_set: ProcessSet, *_: Any, **__: Any
) -> None:
    """Sets the states of a metric to those of all ranks. In place of `Metric._sync_dist`, which
    makes a call for each tensor that this rank has, however many the others have."""
    from torchmetrics.utilities.data import dim_zero_cat

    kind = type(metric).__name__
    names = list(metric._reductions)

    def own() -> tuple[str, list[Any]]:
        states = [_in_host_memory(getattr(metric, name)) for name in names]
        return f"{kind} with the states {', '.join(names)}", states

    form = f"compute of {kind}"
    parts = gather_results(form, own, internal("synchronized", None, process_set), process_set)
    ranks = team_of(form, process_set).ranks
    different = which_ranks([what for what, _ in parts], ranks)
    if different:
        raise HorovodInternalError(
            f"{form}: the ranks have different metrics: {different}; compute the same ones in the "
            "same order on every rank"
        )
    for name, states in zip(names, zip(*(states for _, states in parts), strict=True), strict=True):
        is_list = isinstance(metric._defaults[name], list)
        device = "cpu" if is_list and metric.compute_on_cpu else metric.device
        made: Any
        reduce: Any = metric._reductions[name]
        if is_list or reduce is dim_zero_cat:
            # Of a rank without data the list is empty: it does not even say the dtype.
            made = [_on(device, item) for state in states for item in _items(state)]
        else:
            made = torch.stack([state.to(device) for state in states])
        if reduce is not None and len(made):
            made = reduce(made)
        setattr(metric, name, made)


def _items(state: Any) -> list[Any]:
    return [state] if isinstance(state, torch.Tensor) else list(state)


def _in_host_memory(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        # A copy: pickle would take the whole memory of which it is a view.
        return state.detach().to("cpu", copy=True).contiguous()
    return [_in_host_memory(item) for item in state] if isinstance(state, list) else state


def _on(device: Any, item: Any) -> Any:
    return item.to(device) if isinstance(item, torch.Tensor) else item
