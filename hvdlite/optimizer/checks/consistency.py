"""Checks before the first reduction that all ranks reduce the same gradients in the same way.

Every rank posts an operation of one byte that carries a hash of what it is about to reduce, and
does not wait; the engine compares the hashes. Only if they differ do the ranks exchange
descriptions, so that every rank raises the same error, which names the parameter.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdlite import _core
from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.buckets.slot import strides_in_place
from hvdlite.optimizer.checks.rows import Exchange
from hvdlite.own_names import own_name
from hvdlite.world import world
from hvdlite.world.teams.team import Team


@dataclass(frozen=True)
class Model:
    """What an optimizer reduces, and how: what must be the same on all ranks.

    options: their names and values, in words. parameters: of each some words, of which texts show
        the first, and of the others those that differ.
    """

    options: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls,
        options: Iterable[tuple[str, str]],
        params: Sequence[torch.Tensor],
        name_of: Callable[[torch.Tensor, int], str],
        group_of: Mapping[int, int],
    ) -> Model:
        """options: the arguments. name_of: gives the name for a parameter and its index. group_of:
        by a parameter's id."""
        config = world.current().config
        # These decide when an optimizer communicates.
        knobs = (
            ("HVDLITE_CHECK_NUMERICS", str(int(config.check_numerics))),
            ("HVDLITE_CHECK_PARAMETERS", str(config.check_parameters)),
        )
        # Devices are numbered in order of first use, as ranks may use different ones.
        devices: dict[torch.device, int] = {}
        parameters = []
        for index, param in enumerate(params):
            strides, group = strides_in_place(param), group_of.get(id(param))
            dtype = str(param.dtype).removeprefix("torch.")
            words = (
                f"{name_of(param, index)!r} {dtype}{list(param.shape)}",
                "with gradients" if param.requires_grad else "frozen",
                f"with strides {list(strides)}" if strides else "contiguous",
                f"on {param.device.type} {devices.setdefault(param.device, len(devices))}",
                "in no group" if group is None else f"in group {group}",
            )
            parameters.append(words)
        return cls((*options, *knobs), tuple(parameters))

    def hash(self) -> int:
        """A hash of 64 bits, the same for the same model on every rank."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def difference(models: Sequence[Model], ranks: Sequence[int]) -> str | None:
    """The first difference between the ranks: the same text on every rank, or None.

    models: by member. ranks: by member, its world rank.
    """
    for options in zip(*(model.options for model in models), strict=True):
        if values := which_ranks(["=".join(option) for option in options], ranks):
            advice = "pass the same arguments to DistributedOptimizer on every rank"
            if (name := options[0][0]).startswith("HVDLITE_"):
                advice = f"give every rank the same value of {name}"
            return f"DistributedOptimizer: {values}; {advice}"
    none = ("no such parameter",)
    parameters = itertools.zip_longest(*(model.parameters for model in models), fillvalue=none)
    for index, found in enumerate(parameters):
        there = [each for each in found if each is not none]
        shown = [i == 0 or len(set(words)) > 1 for i, words in enumerate(zip(*there, strict=True))]
        words = [" ".join(itertools.compress(each, shown)) for each in found]
        if values := which_ranks(words, ranks):
            return (
                f"DistributedOptimizer: parameter {index} differs: {values}; on every rank make "
                "the same model, and its optimizer over the same parameters in the same order"
            )
    return None


class ConsistencyCheck:
    """Compares the models of all ranks; the result is there when all ranks have posted it."""

    def __init__(self, team: Team, name: str, model: Model, change: str = "") -> None:
        """Every member makes it, and posts it. name: the same on every member. change: what this
        rank has changed since the last one, in words."""
        self._team = team
        self._name = name
        self._model = model
        self.failed = False
        checked = own_name(name, "consistency", f"the check of the parameters of {{}}{change}")
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._posting = _core.posting(
            *(_core.ALLREDUCE, checked, False, _core.UINT8, byte, byte, _core.MAX)
        )
        self._operations: list[_core.Operation] = []
        # The models of all ranks, exchanged if they differ.
        self._models: Exchange | None = None

    def post(self) -> None:
        """Collective over the team, but does not block. Does nothing if it is already posted."""
        if not self._operations:
            model = self._model
            # Posts and stores it without a bytecode in between, where a signal could raise.
            posting = self._posting.replace(group=(len(model.parameters), model.hash()))
            self._operations.extend(map(self._team.post, (posting,)))

    def reached(self) -> bool:
        """Whether all ranks are known to have the same model. Never blocks."""
        operation = self._operations[0]
        return operation.poll() and operation.wait() is None

    def wait(self) -> None:
        """Blocks until all ranks have posted it; returns if they have the same model. May be called
        again.

        Raises:
            HorovodInternalError: The models differ, or the engine failed; on every rank.
        """
        self.post()
        failure = self._operations[0].wait()
        if failure is not None:
            text = self._difference() or failure
            self.failed = True
            raise HorovodInternalError(text)

    def _difference(self) -> str | None:
        """The difference in words; None if the exchange failed."""
        if self._models is None:
            name = own_name(self._name, "models", "the comparison of the parameters of {}")
            self._models = Exchange(self._team, name, self._model)
        try:
            models = self._models.exchange()
        except HorovodInternalError:
            return None
        return difference(list(models.values()), list(models))
