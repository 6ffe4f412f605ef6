"""Checks once, before the first step, that all ranks start from the same parameters, and the same
state and options of the optimizer.

Each rank's hash travels with something that is sent anyway. Only if the hashes differ do the ranks
compare tensor by tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.checks.same_values import Comparison, Entry, Kind, described, hash_of
from hvdlite.own_names import own_name
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet
from hvdlite.world.teams.team import Team


class StartValues:
    """The parameters of one optimizer before its first step, and what else must be the same."""

    def __init__(
        self,
        name_of: Callable[[torch.Tensor, int], str],
        besides: Callable[[], list[Entry]],
        process_set: ProcessSet,
    ) -> None:
        """name_of: gives the name for a parameter and its index. besides: gives the optimizer's
        state and options."""
        self._name_of = name_of
        self._besides = besides
        self._process_set = process_set
        self._params: Sequence[torch.Tensor] = ()
        self._comparison: Comparison | None = None

    def hash(self, params: Sequence[torch.Tensor]) -> int:
        """A hash of the values as they are now, never 0."""
        self._params = params
        return hash_of(described(self._entries())[1])

    def _entries(self) -> list[Entry]:
        named = ((self._name_of(param, i), param) for i, param in enumerate(self._params))
        return [*(Entry(name, Kind.PARAMETER, p) for name, p in named), *self._besides()]

    def require_same(self, hashes: Sequence[int], team: Team, name: str) -> None:
        """Before the first step: warns on member 0 if the members' values differ.

        Every member calls it with the same hashes; it blocks only if these differ. May be called
        again.

        Args:
            hashes: By member; 0 if it does not compare, and then no member does.
            name: The same on every member.

        Raises:
            HorovodInternalError: They differ in nothing but their order, or HVDLITE_STRICT is 1; on
                every rank.
        """
        if 0 in hashes or len(set(hashes)) == 1:
            return
        if self._comparison is None:
            label = own_name(name, "start", "the comparison of the first values of {}")
            self._comparison = Comparison(
                "DistributedOptimizer: the ranks start from different values",
                *(label, team, self._process_set),
            )
        try:
            self._comparison.run(self._entries)
            return
        except HorovodInternalError as error:
            found = str(error)
        if self._comparison.is_order:
            raise HorovodInternalError(
                f"{found}. All ranks have the same values, in another order; on every rank make "
                "the optimizer over the same parameters in the same order, and pass "
                "named_parameters=model.named_parameters()"
            )
        text = (
            f"{found}; call broadcast_parameters(model.state_dict(), root_rank=0) and "
            "broadcast_optimizer_state(optimizer, root_rank=0) on every rank before the first "
            "step, or pass check_start=False to DistributedOptimizer if this is intended"
        )
        if world.current().config.strict:
            raise HorovodInternalError(text)
        if team.rank == 0:
            warnings.warn(text, stacklevel=2)
