"""The gradients of an optimizer: which parameters have one, their buckets, and the check that they
are the same on all ranks. All of it is rebuilt when the parameters have changed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hvdlite import _core
from hvdlite.compression import Compression
from hvdlite.ops import Average
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.optimizer.buckets.backward_order import BackwardOrder
from hvdlite.optimizer.buckets.bucket import (
    Bucket,
    Combining,
    MakeBucket,
    Sizing,
    lay_out,
    log_sizes,
    make_buckets,
)
from hvdlite.optimizer.buckets.gpu_bucket import GpuBucket, plain_bucket
from hvdlite.optimizer.buckets.slot import Form, Slot, check_reducible
from hvdlite.optimizer.buckets.tree_bucket import TreeBucket, Widened, require_addable
from hvdlite.optimizer.checks.consistency import ConsistencyCheck, Model
from hvdlite.optimizer.checks.other_reducers import require_no_other_reducer
from hvdlite.optimizer.checks.same_values import Entry
from hvdlite.optimizer.checks.start_values import StartValues
from hvdlite.optimizer.hooks import hook, remove_hooks
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.own_names import name_of_optimizer, names_in_words, own_name
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet, included, team_of
from hvdlite.world.teams.team import Team
from hvdlite.world.virtual_ranks import micro_batches

if TYPE_CHECKING:
    from hvdlite.optimizer.buckets.round_record import RoundRecord


@dataclass
class _Build:
    """Everything that is rebuilt together. former: slots that are no longer used."""

    team: Team
    name: str
    params: list[torch.Tensor]
    slots: list[Slot]
    frozen: list[Slot]
    former: list[Slot]
    buckets: list[Bucket]
    record: RoundRecord | None
    carrier: Bucket | RoundRecord | None
    backward_order: BackwardOrder | None
    consistency: ConsistencyCheck | None
    micro_batches: int


class Gradients:
    """The slots and buckets of the parameters, as of the last look at the parameters.

    A bucket starts only after `known_alike` or `require_alike` has shown that all ranks have the
    same buckets.
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
        besides: Callable[[], list[Entry]],
        arrivals: _core.Arrivals,
        shards: Shards | None = None,
        frees: bool = False,
    ) -> None:
        """groups: gives the optimizer's current param_groups. first_form: the assumed form of a
        gradient before the first one has come. optimizer: the name of its class. check_start:
        whether the ranks compare the values from which they start. besides: gives what they compare
        then beside the parameters. arrivals: what the hooks know. shards: decides which gradients
        are sharded. frees: whether `free` gives their memory back to the system."""
        self._groups = groups
        self._names = names
        self.combining = combining
        self._first_form = first_form
        self.sparse_as_dense = sparse_as_dense
        self._options = (
            ("optimizer", optimizer),
            *combining.options(),
            ("sparse_as_dense", repr(sparse_as_dense)),
            ("shard", repr(shards.shard if shards is not None else False)),
        )
        self.shards = shards
        self._frees = frees
        self.process_set = process_set
        self._arrivals = arrivals
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        # Slots whose rows are gathered.
        self.sparse: list[Slot] = []
        # The team and parameters that the buckets were made for.
        self.team: Team | None = None
        self._params: list[torch.Tensor] = []
        # Those that another optimizer reduces are counted, too.
        self._num_params = 0
        self._frozen: list[Slot] = []
        # By id, the parameters that another optimizer reduces.
        self._released: dict[int, torch.Tensor] = {}
        # The buckets must be rebuilt, although the parameters are the same.
        self.stale = False
        # The number of the optimizer in its team, and how often the buckets were made.
        self._number = -1
        self.generation = 0
        self.name = ""
        self._consistency: ConsistencyCheck | None = None
        # What a build that was begun and is not finished has prepared.
        self._next_build: _Build | None = None
        # The team in which the optimizer has its number.
        self._numbered_by: Team | None = None
        # Set if some buckets are on GPUs.
        self.record: RoundRecord | None = None
        # What carries the position of the round; None if there is no other rank.
        self.carrier: Bucket | RoundRecord | None = None
        # Observes the next round, while the backward order is not known.
        self.backward_order: BackwardOrder | None = None
        # Set until the members have compared their parameters, in their first round.
        self._check_start = check_start
        self._besides = besides
        self._start: StartValues | None = None
        # The present buckets have had a whole round, so all ranks know that they are alike.
        self.had_a_round = False
        # With virtual ranks: how many micro-batches a step has on this rank; else 0.
        self.micro_batches = 0
        # Some gradients in buckets travel as float16.
        self.in_half = False
        # Whether all members have cores to spare for reducing; assumed until they say otherwise.
        self._overlaps = True
        # This rank reduces alone, and no option asks for more than the gradients as they are: there
        # are no slots and no hooks.
        self.is_alone = False
        self._detached = False
        if included("DistributedOptimizer", process_set):
            self._build()
        else:
            self.detach()

    def rebuild_if_changed(self) -> None:
        """Rebuilds everything if parameters were frozen, thawed or added (on all ranks alike), if a
        gradient has turned out to be sparse, or if the world is a new one.

        Collective if something has changed, but does not block.
        """
        if self.is_alone and self.process_set.team is None:
            return  # nothing is reduced, also after the world's end
        if self.backward_order is not None and self.backward_order.posted():
            self.learn_order()
        if (
            self.stale
            or (self._consistency is not None and self._consistency.failed)
            or not self.are_current()
            or not _same(self._present(), self._params)
            or (not self._arrivals.are_unchanged(self.slots, self._frozen) and self._have_changed())
        ) and not self._detached:
            self._build()

    def _await_others(self) -> None:
        """The world of one ends, and the next one may have other ranks: a backward pass must see
        it."""
        if self.is_alone and not self._detached and not self.slots:
            for index, param in enumerate(self._params):
                slot = Slot(self._arrivals, self.name_of(param, index), param, self._first_form)
                slot.unhook = hook(slot)
                (self.slots if param.requires_grad else self._frozen).append(slot)
            self._arrivals.note_addresses(self.slots)

    def _have_changed(self) -> bool:
        """Whether parameters were frozen or thawed, or no longer fit their places."""
        self._arrivals.note_addresses(self.slots)
        return (
            not all(slot.param.requires_grad for slot in self.slots)
            or any(slot.param.requires_grad for slot in self._frozen)
            or any(slot.has_changed() for slot in self.slots)
        )

    def are_current(self) -> bool:
        """Whether the world is still the one for which the buckets were made."""
        return self.process_set.team is self.team

    def learn_order(self) -> None:
        """After a round that has shown the backward order: makes new buckets if others are better;
        the gradients keep their values in them. After the first round, first compares the values
        from which the members started.

        Collective, as all members have learnt the same; blocks only if they started from different
        values.

        Raises:
            HorovodInternalError: They started from different values, and HVDLITE_STRICT is 1.
        """
        assert self.backward_order is not None
        assert self.team is not None
        spare = self.backward_order.learn()
        if spare is None:
            self.backward_order.forget()
            return
        if self._start is not None:
            try:
                self._start.require_same(self.backward_order.start_hashes, self.team, self.name)
                require_no_other_reducer(self._params)
            except Exception:
                self._start = None
                raise
            self._start = None
        # Computing on a GPU leaves the cores free.
        self._overlaps = spare or any(bucket.in_gpu_queue for bucket in self.buckets)
        better = lay_out(self.slots, self.combining, self._sizing(self.team))
        # Until now the buckets were whole on every rank.
        cuts = self.shards is not None and any(slot.in_parts for slot in self.slots)
        if not cuts and [set(map(id, slots)) for slots in better] == [
            set(map(id, bucket.slots)) for bucket in self.buckets
        ]:
            self.backward_order = None
            return
        former = [(slot, slot.view) for slot in self.slots]
        self._build()
        for slot, place in former:
            if place is not None:
                slot.move_from(place)

    def travel_as(self, dtype: torch.dtype) -> bool:
        """Whether some gradients travel in this dtype."""
        compression = self.combining.compression
        dtypes = {slot.param.dtype for slot in self.slots}
        return dtype in map(compression.travels_as, dtypes)

    def known_alike(self) -> bool:
        """Whether all ranks are known to have the same buckets. Never blocks."""
        if self._consistency is not None and self._consistency.reached():
            self._consistency = None
        return self._consistency is None

    def require_alike(self) -> None:
        """Blocks until all ranks are known to have the same buckets.

        Raises:
            HorovodInternalError: They don't, or the check failed; on every rank.
        """
        if self._consistency is not None:
            self._consistency.wait()
            self._consistency = None

    def free(self) -> None:
        """After an update, when the parameters are whole: every `.grad` becomes None, and the
        buckets' memory goes back to the system. Does nothing if the optimizer keeps its gradients.
        """
        if not self._frees:
            return
        for slot in self.slots:
            slot.param.grad = slot.round_grad = None
        for bucket in self.buckets:
            bucket.give_back()

    def detach(self) -> None:
        """Removes all slots, buckets and hooks for good."""
        self._detached = self.is_alone = True
        for slot in self.all_slots():
            remove_hooks(slot)
        self.slots, self.buckets, self.sparse, self._frozen = [], [], [], []
        self._consistency = self.backward_order = self.carrier = self._next_build = None
        if self.record is not None:
            self.record.forget()
        self.record = None
        self._groups, self._num_params = lambda: (), 0

    def release(self, params: Mapping[int, torch.Tensor]) -> bool:
        """From now on another optimizer reduces these parameters, given by their ids. Returns
        whether any parameter is left."""
        self._released.update(params)
        present = self._present()
        if len(present) != len(self._params):
            self.stale = True
            for slot in self.all_slots():
                if id(slot.param) in self._released:
                    remove_hooks(slot)
        return bool(present)

    def has_all(self) -> bool:
        """Whether the optimizer still has as many parameters as when the buckets were made."""
        return sum(len(group["params"]) for group in self._groups()) == self._num_params

    def all_slots(self) -> list[Slot]:
        """Those of frozen parameters too."""
        return [*self.slots, *self._frozen]

    def params(self) -> list[torch.Tensor]:
        """All parameters for which the buckets were made, frozen ones too."""
        return self._params

    def _present(self) -> list[torch.Tensor]:
        params = [param for group in self._groups() for param in group["params"]]
        if self._released:
            params = [param for param in params if id(param) not in self._released]
        return params

    @property
    def number(self) -> int:
        """Of the optimizer in its team; the same on every member."""
        return self._number

    def _build(self) -> None:
        """Rebuilds everything. If it is interrupted, the next call goes on, so that all ranks post
        the same."""
        self.stale = True
        if self._next_build is None or self._next_build.team is not self.process_set.team:
            self._next_build = self._prepare()
        build = self._next_build
        team, name = build.team, build.name
        factors = self.combining.factors(team.size, build.micro_batches or 1)
        # In deterministic mode the bits may not depend on how the ranks lie on hosts.
        weighs = _num_hosts(team) == 1 and not world.current().config.deterministic
        for index, bucket in enumerate(build.buckets):
            which = f"(bucket {index + 1} of {len(build.buckets)} of {{}})"
            what = names_in_words([slot.name for slot in bucket.slots])
            label = own_name(
                name, f"bucket.{index}", f"the reduction of the gradients of {what} {which}"
            )
            bucket.make_plan(team, label, *factors, weighs)
        if build.consistency is not None:
            build.consistency.post()
        for slot in build.former:
            remove_hooks(slot)
            # Another parameter may get its id.
            self.combining.group_of.pop(id(slot.param), None)
        # Also frozen ones: once thawed, a backward may reach only them.
        for slot in (*build.slots, *build.frozen):
            if slot.unhook is None:
                slot.unhook = hook(slot)
        self.sparse = [slot for slot in build.slots if slot.form is Form.SPARSE]
        if self.is_alone and team is not self.team:
            at_end = weakref.WeakMethod(self._await_others)
            world.current().before_leaving.append(lambda: (call := at_end()) and call())
        self.slots, self.buckets = build.slots, build.buckets
        self._arrivals.note_addresses(self.slots)
        self.record, self.carrier = build.record, build.carrier
        self._params, self._frozen = build.params, build.frozen
        self._num_params = sum(len(group["params"]) for group in self._groups())
        self._consistency, self.backward_order = build.consistency, build.backward_order
        self.team, self.name, self.had_a_round = team, name, False
        self.micro_batches = build.micro_batches
        self.in_half = any(bucket.wire.dtype is torch.float16 for bucket in build.buckets)
        self.generation, self._next_build = self.generation + 1, None
        self.stale = False
        if team.rank == 0:
            log_sizes(team.ranks[0], name, build.buckets)

    def _prepare(self) -> _Build:
        """Prepares all that needs no other rank."""
        team = team_of("DistributedOptimizer", self.process_set)
        if team is not self._numbered_by:
            self._number, self._numbered_by = next(team.optimizer_numbers), team
            self.generation = 0
        if team is not self.team:
            self._overlaps = True
            self._start = StartValues(self.name_of, self._besides, self.process_set)
            # What was learnt with the ranks of another world does not count.
            for slot in self.all_slots():
                slot.form = self._first_form
                slot.backward_index = None
        params = self._present()
        self.is_alone = team.size == 1 and not self._asks_for_rounds(params)
        if self.is_alone:
            for index, param in enumerate(params):
                if param.requires_grad:
                    check_reducible(self.name_of(param, index), param)
        former = {id(slot.param): slot for slot in self.all_slots()}
        slots: list[Slot] = []
        frozen: list[Slot] = []
        for index, param in enumerate(() if self.is_alone else params):
            if id(param) in former:
                slot = former.pop(id(param))
            else:
                slot = Slot(self._arrivals, self.name_of(param, index), param, self._first_form)
                if self.team is not None and param.requires_grad and param.grad is not None:
                    # A new parameter: a backward may have reached it before it had a hook.
                    slot.unreduced_round = self._arrivals.number
            (slots if param.requires_grad else frozen).append(slot)
        name = name_of_optimizer(self._number, self.generation, self._options[0][1])
        is_order_known = team.size == 1 or all(slot.backward_index is not None for slot in slots)
        make: MakeBucket = plain_bucket
        if self.shards is not None:
            self.shards.look_at(team, params, slots)
            # A round that may show other buckets, or other forms, gives all to every rank.
            make = self.shards.make_bucket if is_order_known else plain_bucket
        sizing = self._sizing(team)
        combining, each = self.combining, micro_batches(world.current().config, team.size)
        if each:
            require_addable((self.name_of(p, i), p) for i, p in enumerate(params))
        if each > 1:
            make = partial(TreeBucket, each, combining.op is Average)
            combining = replace(combining, compression=Widened)
        buckets = make_buckets(slots, combining, sizing, make, gives_back=self._frees)
        carrier: Bucket | RoundRecord | None = None
        backward_order = consistency = record = None
        on_gpus = [bucket for bucket in buckets if isinstance(bucket, GpuBucket)]
        if on_gpus:
            # Imported here, as jobs without GPUs should not load it.
            from hvdlite.optimizer.buckets.round_record import RoundRecord

            record = RoundRecord(team, name, on_gpus, combining.op is Average, self.record)
        if team.size > 1:
            carrier = record or (buckets[-1] if buckets else None)
            if isinstance(carrier, Bucket):
                carrier.carry_position(team.rank, team.size)
            if not is_order_known:
                label = own_name(name, "order", "the exchange after the first backward pass of {}")
                backward_order = BackwardOrder(team, label, slots, self._start_hash)
            consistency = ConsistencyCheck(
                team,
                name,
                Model.of(self._options, params, self.name_of, self.combining.group_of),
                self._changes(slots, frozen) if team is self.team else "",
            )
        return _Build(
            team,
            name,
            params,
            slots,
            frozen,
            list(former.values()),
            buckets,
            record,
            carrier,
            backward_order,
            consistency,
            each,
        )

    def _asks_for_rounds(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether an option makes of gradients something else than they are, also in a world of
        one."""
        config = world.current().config
        return (
            self.combining.compression is not Compression.none
            or self.shards is not None
            or self._frees
            or config.check_numerics
            or bool(micro_batches(config, 1))
            or (config.gpu_collectives == "nccl" and any(param.is_cuda for param in params))
        )

    def _changes(self, slots: Sequence[Slot], frozen: Sequence[Slot]) -> str:
        """What the user has changed on this rank since the last build, in words."""
        before = set(map(id, self.slots))
        known = before | set(map(id, self._frozen))
        found = {
            "now requires_grad=True:": [s for s in slots if id(s) in known - before],
            "now requires_grad=False:": [s for s in frozen if id(s) in before],
            "new:": [s for s in slots if id(s) not in known],
        }
        texts = [
            f"{what} {names_in_words([s.name for s in of])}" for what, of in found.items() if of
        ]
        return f" ({'; '.join(texts)})" if texts else ""

    def name_of_sparse(self, number: int, slot: Slot) -> str:
        """Of the exchange of its rows."""
        words = f"the reduction of the sparse gradient of {slot.name} ({{}})"
        return own_name(self.name, f"sparse.{number}", words)

    def _start_hash(self) -> int:
        if self._start is None or not self._check_start:
            return 0
        return self._start.hash(self._params)

    def _sizing(self, team: Team) -> Sizing:
        members = team.size if team.size > 1 else 0
        several_hosts, on_gpus = _num_hosts(team) > 1, any(p.is_cuda for p in self._present())
        return Sizing(world.current().config, several_hosts, self._overlaps, members, on_gpus)

    def name_of(self, param: torch.Tensor, index: int) -> str:
        """The parameter's name. index: its index among the optimizer's parameters."""
        return self._names.of(param, index)


def _num_hosts(team: Team) -> int:
    hosts = world.current().placement.hosts
    return sum(not set(ranks).isdisjoint(team.ranks) for ranks in hosts)


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
