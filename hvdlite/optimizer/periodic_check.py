"""HVDLITE_CHECK_PARAMETERS=N: every N steps the ranks compare what must be the same on all."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch

from hvdlite.optimizer.checks.same_values import Comparison, Entry
from hvdlite.optimizer.overlap import in_flight
from hvdlite.optimizer.replicated import options_in, parameters_in, state_in
from hvdlite.own_names import own_name
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet

log = logging.getLogger("hvdlite")

VARIABLE = "HVDLITE_CHECK_PARAMETERS"


class PeriodicCheck:
    """Of one optimizer. It counts the steps that all members make together."""

    def __init__(
        self, process_set: ProcessSet, name_of: Callable[[torch.Tensor, int], str]
    ) -> None:
        """name_of: gives the name for a parameter and its index."""
        self.process_set = process_set
        self.name_of = name_of
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        # Steps in a row of which the gradients were not reduced.
        self._local_steps = 0
        # Steps of this rank: after a join, some ranks have made more than others.
        self.steps = 0

    def look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Its distributed optimizer."""
        self._optimizer = weakref.ref(optimizer)

    def besides(self) -> list[Entry]:
        """The optimizer's state and options, as far as they must be the same on all ranks."""
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        return [*state_in(optimizer, self.name_of), *options_in(optimizer)]

    def _every(self) -> int:
        """After how many steps the ranks compare; 0: never."""
        team = self.process_set.team
        if world.active is None or team is None or team.size == 1:
            return 0
        return world.active.config.steps_between_checks

    def after_local_step(self) -> None:
        """After a step with this rank's own gradients, of which the ranks need not make the same
        number: so nothing is compared. Says so once if as many follow each other as should be
        compared."""
        self._local_steps += 1
        every = self._every()
        if every and self._local_steps == max(every, 2) and self.process_set.rank() == 0:
            log.warning(
                "%s: %d steps in a row were made with gradients that are not reduced (in "
                "skip_synchronize() without a synchronize() before, or after backward passes in "
                "no_sync() alone), so each rank trains alone, and nothing is compared; compare by "
                "hvd.check_parameters(model) where the ranks should have the same parameters",
                *(VARIABLE, self._local_steps),
            )

    def after_step(self, optimizer: torch.optim.Optimizer, name: str, counted: int) -> None:
        """Every member calls it after every step. Collective, and blocks, after each N-th.

        name: of the optimizer, the same on every member. counted: the steps since the last join;
            the same on every member.

        Raises:
            DifferenceError: Something differs, and is not repaired; on every rank.
        """
        self.steps += 1
        self._local_steps = 0
        every = self._every()
        if every:
            world.current().had_reduced_step = True
        if not every or counted % every:
            return
        team, repair = self.process_set.team, world.current().config.repairs_parameters
        assert team is not None
        label = own_name(name, "check", f"the comparison of the values of {{}} ({VARIABLE})")
        comparison = Comparison(VARIABLE, label, team, self.process_set, repair)

        def entries() -> list[Entry]:
            parameters = list(parameters_in(optimizer, self.name_of))
            in_flight.wait_for([each.tensor for each in parameters])
            return [*parameters, *self.besides()]

        comparison.run(entries, self.steps)
