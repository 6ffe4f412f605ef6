"""The distributed optimizer for op=Adasum: it combines what a step has changed, not gradients.

    start = parameter;  the optimizer's step with this rank's own gradients;
    parameter = start + Adasum over the ranks of (parameter - start)

So the parameters stay the same on all ranks, and each rank has its own optimizer state (momentum).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.collectives.allreduce import allreduce_, allreduce_async
from hvdlite.collectives.handles import synchronize
from hvdlite.errors import HorovodInternalError, NumericsError
from hvdlite.observe import summary
from hvdlite.ops import Adasum, Max, Sum
from hvdlite.optimizer.arguments import ParameterNames, checked_passes, checked_weight
from hvdlite.optimizer.buckets.bucket import Combining
from hvdlite.optimizer.buckets.slot import check_reducible
from hvdlite.optimizer.checks.consistency import ConsistencyCheck, Model
from hvdlite.optimizer.checks.numerics import Numerics
from hvdlite.optimizer.checks.other_reducers import require_no_other_reducer
from hvdlite.optimizer.checks.same_values import Entry
from hvdlite.optimizer.checks.start_values import StartValues
from hvdlite.optimizer.wrapping import Wrapper
from hvdlite.own_names import name_of_optimizer, own_name
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet, included, team_of
from hvdlite.world.teams.team import Team


class Deltas:
    """Combines what the steps of one optimizer change in its parameters."""

    def __init__(
        self,
        groups: Callable[[], Sequence[dict[str, Any]]],
        names: ParameterNames,
        combining: Combining,
        optimizer: str,
        process_set: ProcessSet,
        check_start: bool,
        besides: Callable[[], list[Entry]],
        passes: int,
    ) -> None:
        """groups: gives the optimizer's current param_groups. optimizer: the name of its class.
        check_start: whether the ranks compare the values from which they start. besides: gives what
        they compare then beside the parameters. passes: what the script has set."""
        self._groups = groups
        self._names = names
        self._combining = combining
        self._options = (("optimizer", optimizer), *combining.options())
        self._process_set = process_set
        self.passes = passes
        # A rank that is not a member makes its steps alone.
        self._is_member = included("DistributedOptimizer", process_set)
        # What follows was made for this team and these parameters.
        self._team: Team | None = None
        # Steps in this world since its last join, the same on all members that have not joined.
        self.steps_since_join = 0
        self._counts_since: tuple[Team | None, int] = (None, 0)
        self._number = -1
        self._generation = 0
        self.name = ""
        self._params: list[torch.Tensor] = []
        self._consistency: ConsistencyCheck | None = None
        # Set until the members have compared their parameters, in their first step.
        self._check_start = check_start
        self._besides = besides
        self._start: StartValues | None = None
        if self._is_member:
            self._build_if_changed()

    def start(self) -> list[torch.Tensor]:
        """Before a step: copies of the parameters. Collective, and blocks, if these or the world
        have changed.

        Raises:
            HorovodInternalError: The ranks' parameters differ; on every rank.
        """
        if not self._is_member:
            return []
        self._build_if_changed()
        team = self._team
        assert team is not None
        if self._counts_since != (since := (team, team.era)):
            self._counts_since, self.steps_since_join = since, 0
        if team.size == 1:
            return []
        if self._consistency is not None:
            self._consistency.wait()
            self._consistency = None
        if self._start is not None:
            self._compare_starts(self._start, team)
        return [param.detach().clone() for param in self._params]

    def require_finite(self, counts: Callable[[], bool]) -> None:
        """After `start`. counts: whether this rank makes a step with its gradients. Collective, and
        blocks, if HVDLITE_CHECK_NUMERICS is on.

        Raises:
            NumericsError: Some rank's gradients are not finite; on every rank.
        """
        team = self._team
        if team is None or not world.current().config.check_numerics:
            return
        named = [(self._name_of(param, index), param) for index, param in enumerate(self._params)]
        numerics = Numerics(team, self.name, named)
        for param in self._params if counts() else ():
            if param.grad is not None:
                numerics.look_at(param, param.grad)
        numerics.post()
        failure = numerics.wait()
        if failure is not None:
            raise HorovodInternalError(failure)
        text = numerics.report(self.steps_since_join + 1)
        if text is not None:
            raise NumericsError(f"{text}. No parameter has changed")

    def finish(self, starts: Sequence[torch.Tensor]) -> None:
        """After the step: sets the parameters to the combined values of all ranks. Blocks.

        Raises:
            HorovodInternalError: It failed, on every rank; the parameters are as before the step.
        """
        try:
            if starts:
                self._combine(starts)
        except BaseException:
            for param, start in zip(self._params, starts, strict=True):
                param.detach().copy_(start)
            raise
        self.steps_since_join += 1
        summary.step_ended(id(self), self.name, self._team.ranks if self._team else ())

    def _compare_starts(self, start: StartValues, team: Team) -> None:
        # By member its hash; then the number of members that take part. A joined rank learns
        # nothing: then the next step compares again.
        numbers = torch.zeros(team.size + 1, dtype=torch.int64, device="cpu")
        numbers[team.rank] = start.hash(self._params) if self._check_start else 0
        numbers[-1] = 1
        name = own_name(self.name, "starts", "the comparison of the first parameter values of {}")
        allreduce_(numbers, name=name, op=Sum, process_set=self._process_set)
        *hashes, members = numbers.tolist()
        if members == team.size:
            self._start = None
            start.require_same(hashes, team, self.name)
            require_no_other_reducer(self._params)

    def _combine(self, starts: Sequence[torch.Tensor]) -> None:
        """Of what some rank has changed: their steps may change different parameters."""
        own = [not torch.equal(*pair) for pair in zip(self._params, starts, strict=True)]
        changed = torch.tensor(own, dtype=torch.uint8, device="cpu")
        words = "the comparison of which parameters {} has changed"
        name = own_name(self.name, "changed", words)
        allreduce_(changed, name=name, op=Max, process_set=self._process_set)
        started = []
        for index in changed.nonzero().flatten().tolist():
            param, start = _real(self._params[index].detach()), _real(starts[index])
            delta = param - start
            delta = delta.to(self._combining.compression.travels_as(delta.dtype))
            words = f"Adasum of {self._name_of(self._params[index], index)} in {{}}"
            name = own_name(self.name, f"delta.{index}", words)
            handle = allreduce_async(delta, name=name, op=Adasum, process_set=self._process_set)
            started.append((param, start, handle))
        for param, start, handle in started:
            combined: Any = synchronize(handle)
            param.copy_(start + combined.to(start.dtype))

    def _build_if_changed(self) -> None:
        params = [param for group in self._groups() for param in group["params"]]
        same = len(params) == len(self._params) and all(map(operator.is_, params, self._params))
        failed = self._consistency is not None and self._consistency.failed
        if same and self._process_set.team is self._team and not failed:
            return
        team = team_of("DistributedOptimizer", self._process_set)
        if team is not self._team:
            self._number = next(team.optimizer_numbers)
            self._generation = 0
            self._start = StartValues(self._name_of, self._besides, self._process_set)
        for index, param in enumerate(params):
            if param.requires_grad:
                check_reducible(self._name_of(param, index), param)
        self.name = name_of_optimizer(self._number, self._generation, self._options[0][1])
        self._generation += 1
        self._team, self._params = team, params
        if team.size > 1:
            model = Model.of(self._options, params, self._name_of, self._combining.group_of)
            self._consistency = ConsistencyCheck(team, self.name, model)
            self._consistency.post()

    def _name_of(self, param: torch.Tensor, index: int) -> str:
        return self._names.of(param, index)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class DeltaOptimizer(Wrapper):
    """The methods that a distributed optimizer which combines deltas adds to its class."""

    _hvdlite_deltas: Deltas

    # With this, GradScaler calls `step` even if this rank's gradients have overflowed, as the other
    # ranks wait for it there; and `step` must undo the scaling.
    _step_supports_amp_scaling = True

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the wrapped class with this rank's gradients, of which the changes are
        combined over all ranks. Every rank calls it.

        A rank on which GradScaler found infinite gradients adds nothing.

        Raises:
            HorovodInternalError: The combination failed, on every rank; the parameters are as
                before.
        """
        deltas = self._hvdlite_deltas
        starts = deltas.start()
        # The gradients of a closure are not known yet; and it may be called several times, on each
        # rank as often as its own optimizer likes.
        if not callable(kwargs.get("closure", args[0] if args else None)):
            # (With GradScaler a rank whose gradients have overflowed adds nothing.)
            deltas.require_finite(lambda: not vars(self).get("found_inf", 0))
        result = self._own_step(*args, **kwargs)
        with torch.no_grad():
            deltas.finish(starts)
        self._hvdlite_check.after_step(self, deltas.name, deltas.steps_since_join)
        return result

    def _replicates_state(self, param: torch.Tensor, index: int) -> bool:
        return False

    def synchronize(self) -> None:
        """Returns at once: nothing is combined before the step."""

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Changes nothing: there is no step without combining."""
        return contextlib.nullcontext()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Changes nothing: no backward communicates."""
        return contextlib.nullcontext()

    @property
    def backward_passes_per_step(self) -> int:
        """What it was set to."""
        return self._hvdlite_deltas.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes nothing: no backward communicates, however many there are before a step."""
        self._hvdlite_deltas.passes = checked_passes(passes)

    def set_weight(self, weight: float) -> None:
        """Raises ValueError: Adasum forms no mean."""
        checked_weight(weight, Adasum)

    def _own_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step that GradScaler and the wrapped class make together in one process."""
        # Fused optimizers undo the scaling by themselves; the others don't support it.
        attributes = vars(self)
        handles_scaling = attributes.get(
            "_step_supports_amp_scaling", getattr(super(), "_step_supports_amp_scaling", False)
        )
        if "found_inf" not in attributes or handles_scaling:
            return super().step(*args, **kwargs)
        if float(attributes["found_inf"]):
            return None
        told = {name: attributes.pop(name) for name in ("found_inf", "grad_scale")}
        try:
            if told["grad_scale"] is not None:
                factor = told["grad_scale"].double().reciprocal().float()
                for param in (param for group in self.param_groups for param in group["params"]):
                    if param.grad is not None:
                        param.grad.mul_(factor.to(param.grad.device))
            return super().step(*args, **kwargs)
        finally:
            attributes.update(told)
