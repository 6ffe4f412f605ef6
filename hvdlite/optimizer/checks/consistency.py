"""Checks before the first reduction that all ranks reduce the same gradients in the same way.

Every rank posts an operation of one byte that carries a hash of what it is about to reduce, and
does not wait; the engine compares the hashes. Only if they differ do the ranks exchange
descriptions, so that every rank raises the same error, which names the parameter.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdlite import _core
from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.collectives.host_gather import HostGather
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.buckets.slot import strides_in_place
from hvdlite.own_names import own_name
from hvdlite.world import world
from hvdlite.world.teams.team import Team


@dataclass(frozen=True)
class Parameter:
    """What must be the same on all ranks about one parameter.

    device: its type, and its index among the devices that this rank uses, in order of first use:
        ranks may use different devices.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: str
    requires_grad: bool
    group: int | None

    def in_words(self, others: Sequence[Parameter]) -> str:
        """Its description, with everything in which it differs from the others."""
        text = f"{self.name!r} {self.dtype}{list(self.shape)}"
        if any(other.requires_grad != self.requires_grad for other in others):
            text += " with gradients" if self.requires_grad else " frozen"
        if any(other.strides != self.strides for other in others):
            text += f" with strides {list(self.strides)}" if self.strides else " contiguous"
        if any(other.device != self.device for other in others):
            text += f" on {self.device}"
        if any(other.group != self.group for other in others):
            text += " in no group" if self.group is None else f" in group {self.group}"
        return text


@dataclass(frozen=True)
class Model:
    """What an optimizer reduces, and how. options: their names and values, in words."""

    options: tuple[tuple[str, str], ...]
    parameters: tuple[Parameter, ...]

    def hash(self) -> int:
        """A hash of 64 bits, the same for the same model on every rank."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def knob_options() -> tuple[tuple[str, str], ...]:
    """The knobs of this world that decide when an optimizer communicates, as options."""
    config = world.current().config
    return (
        ("HVDLITE_CHECK_NUMERICS", str(int(config.check_numerics))),
        ("HVDLITE_CHECK_PARAMETERS", str(config.check_parameters)),
    )


def parameters_of(
    params: Sequence[torch.Tensor],
    name_of: Callable[[torch.Tensor, int], str],
    group_of: Mapping[int, int],
) -> tuple[Parameter, ...]:
    """name_of: gives the name for a parameter and its index. group_of: by a parameter's id."""
    devices: dict[torch.device, int] = {}
    return tuple(
        Parameter(
            name_of(param, index),
            str(param.dtype).removeprefix("torch."),
            tuple(param.shape),
            strides_in_place(param),
            f"{param.device.type} {devices.setdefault(param.device, len(devices))}",
            param.requires_grad,
            group_of.get(id(param)),
        )
        for index, param in enumerate(params)
    )


def difference(models: Sequence[Model], ranks: Sequence[int]) -> str | None:
    """The first difference between the ranks: the same text on every rank, or None.

    models: by member. ranks: by member, its world rank.
    """
    for i, (option, _) in enumerate(models[0].options):
        if values := which_ranks([f"{option}={model.options[i][1]}" for model in models], ranks):
            if option.startswith("HVDLITE_"):
                return f"DistributedOptimizer: {values}; give every rank the same value of {option}"
            return (
                f"DistributedOptimizer: {values}; pass the same arguments to DistributedOptimizer "
                "on every rank"
            )
    for i in range(max(len(model.parameters) for model in models)):
        found = [model.parameters[i] if i < len(model.parameters) else None for model in models]
        if any(parameter != found[0] for parameter in found):
            there = [parameter for parameter in found if parameter is not None]
            words = [
                parameter.in_words(there) if parameter is not None else "no such parameter"
                for parameter in found
            ]
            return (
                f"DistributedOptimizer: parameter {i} differs: {which_ranks(words, ranks)}; "
                "on every rank make the same model, and its optimizer over the same parameters in "
                "the same order"
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
        # All ranks are known to have the same model.
        self._reached = False
        self.failed = False
        checked = own_name(name, "consistency", f"the check of the parameters of {{}}{change}")
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._posting = _core.posting(
            *(_core.ALLREDUCE, checked, False, _core.UINT8, byte, byte, _core.MAX)
        )
        self._operations: list[_core.Operation] = []
        # The models of all ranks, exchanged if they differ.
        self._models: HostGather | None = None

    def post(self) -> None:
        """Collective over the team, but does not block. Does nothing if it is already posted."""
        if not self._operations:
            model = self._model
            # Posts and stores it without a bytecode in between, where a signal could raise.
            posting = self._posting.replace(group=(len(model.parameters), model.hash()))
            self._operations.extend(map(self._team.post, (posting,)))

    def reached(self) -> bool:
        """Whether all ranks are known to have the same model. Never blocks."""
        if not self._reached:
            operation = self._operations[0]
            self._reached = operation.poll() and operation.wait() is None
        return self._reached

    def wait(self) -> None:
        """Blocks until all ranks have posted it; returns if they have the same model. May be called
        again.

        Raises:
            HorovodInternalError: The models differ, or the engine failed; on every rank.
        """
        if self._reached:
            return
        self.post()
        failure = self._operations[0].wait()
        if failure is None:
            self._reached = True
            return
        text = self._difference() or failure
        self.failed = True
        raise HorovodInternalError(text)

    def _difference(self) -> str | None:
        """The difference in words; None if the exchange failed."""
        if self._models is None:
            payload = torch.frombuffer(bytearray(pickle.dumps(self._model)), dtype=torch.uint8)
            self._models = HostGather(
                self._team,
                own_name(self._name, "models", "the comparison of the parameters of {}"),
                payload,
            )
        gather = self._models
        gather.post()
        if gather.wait() is not None:
            return None
        parts = torch.split(gather.result(), list(gather.rows()))
        models = [pickle.loads(part.numpy().tobytes()) for part in parts]
        return difference(models, self._team.ranks)
