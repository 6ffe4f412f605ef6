"""Metrics: means over all samples of all ranks, however many each rank has.

The mean of the ranks' means, which most scripts compute, is not the mean over all samples where the
ranks have unequal numbers of them, as at the end of most data sets. Here it is sum(w·x) / sum(w)
over the ranks, with one collective for all values of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from hvdlite.collectives.objects import gather_results
from hvdlite.errors import HorovodInternalError
from hvdlite.recipes.metric_values import (
    Number,
    Path,
    checked_number,
    checked_weight,
    flattened,
    in_host_memory,
    in_words,
    mapped,
    which_ranks_have,
)
from hvdlite.recipes.weighted_mean import State, WeightedMean
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of

# Values on devices are read when so many updates are waiting for it.
_MOST_PENDING = 64


def average_metrics(
    values: Any,
    weight: float | torch.Tensor = 1.0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The weighted mean of each value over the ranks: of all samples, if `weight` is their number.

    Every rank calls it, with the same keys in any order. Blocks; one allgather for all values.
    Ranks that have joined (`hvd.join`) can't take part.

    Args:
        values: A number, a tensor of one element on any device, or a dict, list or tuple of them,
            nested as you like. Each is this rank's mean over its own samples.
        weight: How many samples this rank's values are of; 0 or more, not necessarily an integer.
            With 0 the values do not count and may be anything: NaN, None, with other keys or none.
            If its keys differ from the others', this rank gets theirs.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The same structure with floats, the same on every rank: each is the float64 nearest to the
        true mean of the float64 values, on whichever ranks they are. NaN if all weights are 0.

    Raises:
        ValueError: On a rank: a value is no number, or the weight is negative or not finite.
        HorovodInternalError: The ranks with samples have different keys, on every rank; or another
            rank got the ValueError.

    Example:
        On two ranks, of which rank 0 has 3 samples and rank 1 has 1:

        >>> from hvdlite.recipes import average_metrics
        >>> means = {"loss": 1.0 + hvd.rank(), "accuracy": 0.5}
        >>> average_metrics(means, weight=3 - 2 * hvd.rank())
        {'loss': 1.25, 'accuracy': 0.5}
    """

    samples = _Samples("average_metrics")

    def collected() -> _Part:
        # Not left on a device: whether it is 0 decides what the values may be.
        samples.add(values, float(checked_number("average_metrics", "weight", weight)))
        return samples.part()

    return _means("average_metrics", collected, samples, name, process_set)


class Metric:
    """The weighted mean of what all ranks have passed to `update` since the last `reset`.

    `update` sends nothing, and does not wait for a GPU: it keeps copies of tensors there. Ranks may
    call it different numbers of times, or not at all.

    Args:
        name: The name of the collective in `compute`, as for `allreduce`, and of the metric in
            errors.
        process_set: The ranks that take part.

    Example:
        On two ranks:

        >>> from hvdlite.recipes import Metric
        >>> metric = Metric("validation")
        >>> for batch in range(1 + hvd.rank()):
        ...     metric.update({"loss": 2.0 * hvd.rank()}, weight=4)
        >>> metric.compute()
        {'loss': 1.3333333333333333}
    """

    def __init__(
        self, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> None:
        self.name = name
        self._process_set = process_set
        self._form = f"Metric {name!r}" if name else "Metric"
        self._samples = _Samples(self._form)

    def __repr__(self) -> str:
        return f"Metric({self.name!r})" if self.name else "Metric()"

    def update(self, values: Any, weight: float | torch.Tensor = 1.0) -> None:
        """Adds the mean of `weight` samples. Not collective.

        Args:
            values: As for `average_metrics`; the same keys in every call with samples.
            weight: The number of samples; a tensor of one element on a device is not waited for, so
                that the values must be numbers even if it is 0.

        Raises:
            ValueError: A value is no number, the weight is negative, or the keys are not those of
                the calls before.
        """
        self._samples.add(values, weight)

    def compute(self) -> Any:
        """The mean of each value over the samples of all ranks; updates may go on after it.

        Every rank calls it, also one that had no samples. Blocks; one allgather for all values.

        Returns:
            The structure of the values with floats, as `average_metrics` does; NaN if no rank has
            made an update.

        Raises:
            HorovodInternalError: The ranks have different keys; on every rank.
        """
        samples = self._samples
        return _means(self._form, samples.part, samples, self.name, self._process_set)

    def reset(self) -> None:
        """Forgets all updates of this rank. Not collective."""
        self._samples = _Samples(self._form)


class _Part(NamedTuple):
    """What one rank tells the others."""

    means: dict[Path, State]
    structure: Any
    is_of_samples: bool


class _Samples:
    """The means of one rank's values, by path."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._means: dict[Path, WeightedMean] = {}
        self._pending: list[tuple[dict[Path, Number], Number]] = []
        # The first values, with 0 in place of each; None: there were none. Those of weight 0 give
        # way to others.
        self.structure: Any = None
        self._is_structured = False  # by others
        # Whether any weight was not 0.
        self._is_of_samples = False

    def add(self, values: Any, weight: Any) -> None:
        weight = checked_number(self._form, "weight", weight)
        if not isinstance(weight, torch.Tensor):
            checked_weight(self._form, weight)
            if weight == 0:
                if self.structure is None:
                    self.structure = _structure_of(values)
                return
        numbers = {
            path: checked_number(self._form, in_words(path), value)
            for path, value in flattened(values).items()
        }
        if not self._is_structured:
            self.structure, self._is_structured = _structure_of(values), True
            self._means = {path: WeightedMean() for path in numbers}
        elif numbers.keys() != self._means.keys():
            raise ValueError(
                f"{self._form}: the keys are {_listed(numbers)}, those of the first update were "
                f"{_listed(self._means)}; pass the same keys in every update"
            )
        self._pending.append((numbers, weight))
        if len(self._pending) >= _MOST_PENDING:
            self._settle()

    def part(self) -> _Part:
        self._settle()
        means = {path: mean.state() for path, mean in self._means.items()}
        return _Part(means, self.structure, self._is_of_samples)

    def _settle(self) -> None:
        """Adds the pending updates to the means. A bad weight among them is an error, and is left
        out; the others are added."""
        pending, self._pending = self._pending, []
        read = iter(
            in_host_memory(
                number for numbers, weight in pending for number in (weight, *numbers.values())
            )
        )
        error: ValueError | None = None
        for numbers, _ in pending:
            given = next(read)
            values = {path: next(read) for path in numbers}
            try:
                weight = checked_weight(self._form, given)
            except ValueError as problem:
                error = error or problem
                continue
            self._is_of_samples |= weight > 0
            for path, value in values.items():
                self._means[path].add(value, weight)
        if error is not None:
            raise error


def _means(
    form: str,
    make: Callable[[], _Part],
    samples: _Samples,
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    """The means of all ranks, in the structure of this rank's samples. make: checks this rank's
    values, and may raise."""
    parts = gather_results(form, make, name, process_set)
    ranks = team_of(form, process_set).ranks
    # A rank without samples need not know the keys.
    speaking = {rank: part for rank, part in zip(ranks, parts, strict=True) if part.is_of_samples}
    different = which_ranks_have({rank: part.means for rank, part in speaking.items()})
    if different:
        raise HorovodInternalError(
            f"{form}: the ranks have different keys: {different}; pass the same keys on every "
            "rank, or weight=0 on a rank without samples"
        )
    sums: dict[Path, WeightedMean] = {}
    for part in speaking.values():
        for path, state in part.means.items():
            sums.setdefault(path, WeightedMean()).merge(state)
    own = samples.structure
    if speaking:
        if flattened(own).keys() == sums.keys():
            return _filled(own, sums)
        return _filled(next(iter(speaking.values())).structure, sums)
    # Nobody has samples: NaN for each key, of this rank or else of another.
    structures = [own, *(part.structure for part in parts)]
    return _filled(next(filter(flattened, structures), own), {})


def _filled(structure: Any, sums: Mapping[Path, WeightedMean]) -> Any:
    """The means in that structure; NaN where there is none."""
    if structure is None:
        return math.nan
    return mapped(structure, lambda at, _: sums[at].result() if at in sums else math.nan)


def _structure_of(values: Any) -> Any:
    return mapped(values, lambda *_: 0.0)


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(map(in_words, paths)) or "none"
