"""Whether all ranks reduce the same gradients alike, found out before the first reduction.

Every rank posts an operation of one byte that carries a hash of what it is about to reduce, and
goes on; the engine compares the hashes. Only where they differ do the ranks exchange what they
have, so that every rank raises the same error, which names the parameter.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdlite import _core
from hvdlite.collectives.host_gather import HostGather
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.buckets.bucket import strides_in_place
from hvdlite.world.teams import Team


@dataclass(frozen=True)
class Parameter:
    """What must be the same on all ranks about one parameter.

    device: its type, and which of this rank's devices it is, as ranks may have different ones.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: str
    requires_grad: bool
    group: int | None

    def in_words(self, others: Sequence[Parameter]) -> str:
        """With what sets it apart from the others."""
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
    """What an optimizer reduces, and how. options: names and values, in words."""

    options: tuple[tuple[str, str], ...]
    parameters: tuple[Parameter, ...]

    def hash(self) -> int:
        """64 bits that are the same where the model is."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def parameters_of(
    params: Sequence[torch.Tensor],
    name_of: Callable[[torch.Tensor, int], str],
    group_of: Mapping[int, int],
) -> tuple[Parameter, ...]:
    """name_of: from a parameter and its index. group_of: by a parameter's id."""
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
    """What is not the same on all ranks, in words that are the same everywhere; None: nothing.

    models: by member. ranks: by member, its world rank.
    """
    for i, (option, _) in enumerate(models[0].options):
        if values := differing([f"{option}={model.options[i][1]}" for model in models], ranks):
            return (
                f"DistributedOptimizer: {values}; make the optimizers with the same arguments on "
                "every rank"
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
                f"DistributedOptimizer: parameter {i} differs: {differing(words, ranks)}; make "
                "the same model, and its optimizer over the same parameters in the same order, on "
                "every rank"
            )
    return None


def differing(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Which ranks have which value; empty where all have the same."""
    by_value: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) == 1:
        return ""
    return ", ".join(f"{value} on {listed(who)}" for value, who in by_value.items())


def listed(ranks: Sequence[int]) -> str:
    """As 'rank 3' or 'ranks 0, 2': not all where they are many."""
    shown = ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


class Agreement:
    """The question; it is answered when all ranks have asked it."""

    def __init__(self, team: Team, name: str, model: Model) -> None:
        """Every member makes it, and posts it. name: the same on every member."""
        self._team = team
        self._name = name
        self._model = model
        # All ranks are known to have the same model, or that they have not.
        self._reached = False
        self.failed = False
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._posting = _core.posting(
            *(_core.ALLREDUCE, f"{name}.agreement", False, _core.UINT8, byte, byte, _core.MAX)
        )
        self._operations: list[_core.Operation] = []
        # Of all ranks, where they differ.
        self._models: HostGather | None = None

    def post(self) -> None:
        """Collective over the team, but does not block. Nothing where it is posted already."""
        if not self._operations:
            model = self._model
            # Posted and noted without a bytecode in between: no signal's exception can part them.
            posting = self._posting.replace(group=(len(model.parameters), model.hash()))
            self._operations.extend(map(self._team.post, (posting,)))

    def reached(self) -> bool:
        """Whether all ranks are known to have the same model. Never blocks."""
        if not self._reached:
            operation = self._operations[0]
            self._reached = operation.poll() and operation.wait() is None
        return self._reached

    def wait(self) -> None:
        """Returns where all ranks have the same model. Blocks until all have asked; may be called
        again.

        Raises:
            HorovodInternalError: They have not, or the engine failed; on every rank alike.
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
        """What the ranks have that is not the same; None: it could not be found out."""
        if self._models is None:
            payload = torch.frombuffer(bytearray(pickle.dumps(self._model)), dtype=torch.uint8)
            self._models = HostGather(self._team, f"{self._name}.models", payload)
        gather = self._models
        gather.post()
        if gather.wait() is not None:
            return None
        parts = torch.split(gather.result(), list(gather.rows()))
        models = [pickle.loads(part.numpy().tobytes()) for part in parts]
        return difference(models, self._team.ranks)
