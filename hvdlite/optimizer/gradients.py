"""The gradients of an optimizer: whose parameters have one, in which buckets they lie, and whether
all ranks have the same. All of it is made anew when the parameters have changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.optimizer.buckets.backward_order import BackwardOrder
from hvdlite.optimizer.buckets.bucket import (
    Bucket,
    Combining,
    Form,
    Sizing,
    Slot,
    lay_out,
    make_buckets,
)
from hvdlite.optimizer.checks.consistency import ConsistencyCheck, Model, parameters_of
from hvdlite.optimizer.checks.other_reducers import warn_of_other_reducers
from hvdlite.optimizer.checks.start_values import StartValues, report_difference
from hvdlite.world import world
from hvdlite.world.process_sets import ProcessSet, included, team_of
from hvdlite.world.teams import Team

Hook = Callable[[Slot, torch.Tensor], None]


@dataclass
class _Build:
    """All that is made anew together. former: slots that are not among these any more."""

    team: Team
    name: str
    params: list[torch.Tensor]
    slots: list[Slot]
    frozen: list[Slot]
    former: list[Slot]
    buckets: list[Bucket]
    carrier: Bucket | None
    backward_order: BackwardOrder | None
    consistency: ConsistencyCheck | None


class Gradients:
    """The slots and buckets of the parameters as they were when last looked at.

    Whoever starts a bucket has seen before that the ranks are `alike`.
    """

    def __init__(
        self,
        groups: Callable[[], Sequence[dict[str, Any]]],
        names: ParameterNames,
        combining: Combining,
        first_form: Form,
        sparse_as_dense: bool,
        optimizer: str,
        process_set: ProcessSet,
        check_start: bool,
        hook: Hook,
    ) -> None:
        """groups: gives the optimizer's param_groups, as they are then. first_form: what a gradient
        is taken for before the first has come. optimizer: its class. check_start: whether the
        ranks compare the values from which they start. hook: is called with each
        gradient that autograd has accumulated."""
        self._groups = groups
        self._names = names
        self.combining = combining
        self._first_form = first_form
        self.sparse_as_dense = sparse_as_dense
        self._options = (
            ("optimizer", optimizer),
            *combining.options(),
            ("sparse_as_dense", repr(sparse_as_dense)),
        )
        self.process_set = process_set
        self._hook = hook
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        # Those whose rows are gathered.
        self.sparse: list[Slot] = []
        # What the buckets were made for.
        self.team: Team | None = None
        self._params: list[torch.Tensor] = []
        self._frozen: list[Slot] = []
        # By their ids, those that another optimizer reduces.
        self._released: dict[int, torch.Tensor] = {}
        # They must be made anew, although the parameters are the same.
        self.stale = False
        # The number of the optimizer in its team, and how often the buckets were made.
        self._number = -1
        self._generation = 0
        self.name = ""
        self._consistency: ConsistencyCheck | None = None
        # They are being made; and what they will be.
        self._building = False
        self._next_build: _Build | None = None
        # The team whose number the optimizer has.
        self._numbered_by: Team | None = None
        # The bucket that says which round it is; None: nobody is there to be told.
        self.carrier: Bucket | None = None
        # Of the next round, where the order in which backward comes to the gradients isn't known.
        self.backward_order: BackwardOrder | None = None
        # Until the members have compared their parameters, in their first round.
        self._check_start = check_start
        self._start: StartValues | None = None
        # Whether all members have cores to spare for reducing; until they say that they haven't.
        self._overlaps = True
        self._detached = False
        if included("DistributedOptimizer", process_set):
            self._build(0)
        else:
            self.detach()

    def rebuild_if_changed(self, round_number: int) -> None:
        """Parameters may be frozen, thawed or added between steps, on all ranks alike; they may
        have shown to be sparse; and the world may be a new one.

        Collective where something has changed, but does not block.
        """
        # What a signal's exception has interrupted the other ranks have done.
        if self._building:
            self._build(round_number)
        if self.backward_order is not None and self.backward_order.posted():
            self.learn_order(round_number)
        if (
            self.stale
            or (self._consistency is not None and self._consistency.failed)
            or not self.are_current()
            or not _same(self._present(), self._params)
            or not all(slot.param.requires_grad for slot in self.slots)
            or any(slot.param.requires_grad for slot in self._frozen)
            or any(slot.has_changed() for slot in self.slots)
        ) and not self._detached:
            self._build(round_number)

    def are_current(self) -> bool:
        """Whether the world is still the one for which they were made."""
        return self.process_set.team is self.team

    def learn_order(self, round_number: int) -> None:
        """After a round that has shown the backward order: makes new buckets if others are better;
        the gradients keep their values in them. After the first round, first compares the values
        from which the members started.

        Collective, as the members have learnt the same; blocks only where they started differently.

        Raises:
            HorovodInternalError: They started differently, and HVDLITE_STRICT is 1.
        """
        assert self.backward_order is not None
        assert self.team is not None
        spare = self.backward_order.learn()
        if spare is None:
            self.backward_order.forget()
            return
        if self._start is not None:
            text = self._start.difference(self.backward_order.start_hashes, self.team, self.name)
            if self.team.rank == 0:
                warn_of_other_reducers(self._params)
            try:
                report_difference(text, self.team)
            except Exception:
                self._start = None
                raise
            self._start = None
        # What computes on a GPU leaves the cores alone.
        self._overlaps = spare or any(bucket.in_lane for bucket in self.buckets)
        better = lay_out(self.slots, self.combining, self._sizing(self.team))
        if [set(map(id, slots)) for slots in better] == [
            set(map(id, bucket.slots)) for bucket in self.buckets
        ]:
            self.backward_order = None
            return
        former = [(slot, slot.view) for slot in self.slots]
        self._build(round_number)
        for slot, place in former:
            if place is not None:
                slot.move_from(place)

    def known_alike(self) -> bool:
        """Whether all ranks are known to have the same buckets. Never blocks."""
        if self._consistency is not None and self._consistency.reached():
            self._consistency = None
        return self._consistency is None

    def require_alike(self) -> None:
        """Returns when all ranks are known to have the same buckets. Blocks.

        Raises:
            HorovodInternalError: They have not, or it could not be found out; on every rank.
        """
        if self._consistency is not None:
            self._consistency.wait()
            self._consistency = None

    def detach(self) -> None:
        """There are no gradients any more, whatever happens to the parameters."""
        self._detached = True
        for slot in (*self.slots, *self._frozen):
            _unhook(slot)
        self.slots, self.buckets, self.sparse, self._frozen = [], [], [], []
        self._consistency = self.backward_order = self.carrier = self._next_build = None
        self._building = False
        self._groups = lambda: ()

    def release(self, params: Mapping[int, torch.Tensor]) -> bool:
        """These, by their ids, are another optimizer's from now on. Whether any is left."""
        self._released.update(params)
        present = self._present()
        if len(present) != len(self._params):
            self.stale = True
            for slot in (*self.slots, *self._frozen):
                if id(slot.param) in self._released:
                    _unhook(slot)
        return bool(present)

    def _present(self) -> list[torch.Tensor]:
        params = [param for group in self._groups() for param in group["params"]]
        if self._released:
            params = [param for param in params if id(param) not in self._released]
        return params

    def _build(self, round_number: int) -> None:
        """Makes all anew. A signal's exception may come at any place: then the next call goes on,
        so that what the ranks post stays the same."""
        self._building = True
        if self._next_build is None or self._next_build.team is not self.process_set.team:
            self._next_build = self._prepare(round_number)
        build = self._next_build
        team, name = build.team, build.name
        op, prescale, postscale = self.combining.factors(team.size)
        for index, bucket in enumerate(build.buckets):
            bucket.make_plan(team, f"{name}.bucket.{index}", op, prescale, postscale)
        if build.consistency is not None:
            build.consistency.post()
        for slot in build.former:
            _unhook(slot)
            # Its id may become another parameter's.
            self.combining.group_of.pop(id(slot.param), None)
        # Also those that are frozen: a backward may come to them alone once they are thawed.
        for slot in (*build.slots, *build.frozen):
            if slot.unhook is None:
                slot.unhook = _hook(slot, self._hook)
        self.sparse = [slot for slot in build.slots if slot.form is Form.SPARSE]
        self.slots, self.buckets, self.carrier = build.slots, build.buckets, build.carrier
        self._params, self._frozen = build.params, build.frozen
        self._consistency, self.backward_order = build.consistency, build.backward_order
        self.team, self.name, self.stale = team, name, False
        self._generation, self._next_build, self._building = self._generation + 1, None, False

    def _prepare(self, round_number: int) -> _Build:
        """What can be made without the other ranks. May be called again."""
        team = team_of("DistributedOptimizer", self.process_set)
        if team is not self._numbered_by:
            self._number, self._numbered_by = next(team.optimizer_numbers), team
            self._generation = 0
        if team is not self.team:
            self._overlaps = True
            self._start = StartValues(self._name_of)
            # What the ranks of another world knew does not count.
            for slot in (*self.slots, *self._frozen):
                slot.form = self._first_form
                slot.backward_index = None
        params = self._present()
        former = {id(slot.param): slot for slot in (*self.slots, *self._frozen)}
        slots: list[Slot] = []
        frozen: list[Slot] = []
        for index, param in enumerate(params):
            if id(param) in former:
                slot = former.pop(id(param))
            else:
                slot = Slot(self._name_of(param, index), param, self._first_form)
                if self.team is not None and param.requires_grad and param.grad is not None:
                    # Added, and backward may have been here before its hook was.
                    slot.unreduced_round = round_number
            (slots if param.requires_grad else frozen).append(slot)
        name = f"DistributedOptimizer.{self._number}.{self._generation}"
        buckets = make_buckets(slots, self.combining, self._sizing(team))
        carrier = backward_order = consistency = None
        if team.size > 1:
            if buckets:
                carrier = buckets[-1]
                carrier.carry_position()
            if any(slot.backward_index is None for slot in slots):
                backward_order = BackwardOrder(team, f"{name}.order", slots, self._start_hash)
            parameters = parameters_of(params, self._name_of, self.combining.group_of)
            consistency = ConsistencyCheck(team, name, Model(self._options, parameters))
        return _Build(
            team,
            name,
            params,
            slots,
            frozen,
            list(former.values()),
            buckets,
            carrier,
            backward_order,
            consistency,
        )

    def _start_hash(self) -> int:
        if self._start is None or not self._check_start:
            return 0
        return self._start.hash(self._params)

    def _sizing(self, team: Team) -> Sizing:
        here = world.current()
        hosts = sum(not set(ranks).isdisjoint(team.ranks) for ranks in here.placement.hosts)
        return Sizing(here.config, hosts > 1, self._overlaps)

    def _name_of(self, param: torch.Tensor, index: int) -> str:
        return self._names.of(param, index)


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _hook(slot: Slot, hook: Hook) -> Callable[[], None] | None:
    """What undoes it. None: it can't have a gradient."""
    param = slot.param
    if not (param.is_floating_point() or param.is_complex()):
        return None
    frozen = not param.requires_grad
    # torch refuses to put a hook on a frozen one, and keeps that of one that is frozen later.
    if frozen:
        param.requires_grad_(True)
    try:
        handle = param.register_post_accumulate_grad_hook(lambda param: hook(slot, param))  # type: ignore[no-untyped-call]
    finally:
        if frozen:
            param.requires_grad_(False)
    return handle.remove  # type: ignore[no-any-return]


def _unhook(slot: Slot) -> None:
    if slot.unhook is not None:
        slot.unhook()
        slot.unhook = None
