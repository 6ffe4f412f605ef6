"""The states of this rank's random generators: python's, NumPy's, torch's, those of GPUs, and those
that the script has made.

In types that `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

# By the names that the script has given them.
Made = Mapping[str, torch.Generator]

_MADE = "made: "  # and the name


def captured(made: Made) -> dict[str, Any]:
    """The states now. NumPy's if the script uses NumPy, GPUs' if it uses them."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    states |= {_MADE + name: generator.get_state() for name, generator in made.items()}
    if "numpy" in sys.modules:
        states["numpy"] = _plain(sys.modules["numpy"].random.get_state(legacy=False))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = {
            "device": torch.cuda.current_device(),
            "states": torch.cuda.get_rng_state_all(),
        }
    return states


def restore(everyones: list[dict[str, Any]], rank: int, made: Made) -> None:
    """Puts the generators of a rank into the states that it had.

    A rank that there was not: a generator that was in the same state on all ranks is so again;
    others are seeded by their state on rank 0 and by the number of the rank.

    everyones: what `captured` has returned, by rank.
    """
    if rank < len(everyones):
        for kind, state in everyones[rank].items():
            _set(kind, state, made)
        return
    for kind, first in everyones[0].items():
        digests = {_digest(states.get(kind)) for states in everyones}
        if len(digests) == 1:
            _set(kind, first, made)
        else:
            seed = hashlib.sha256(_digest(first) + rank.to_bytes(8, "little")).digest()
            _seed(kind, int.from_bytes(seed[:8], "little"), made)


def drawn_again(made: Made) -> Callable[[], None]:
    """What puts torch's generator, and those that the script has made, into their present states: a
    DataLoader draws a number from one of them when an iteration begins."""
    state = torch.get_rng_state()
    states = [(generator, generator.get_state()) for generator in made.values()]

    def put_back() -> None:
        torch.set_rng_state(state)
        for generator, own in states:
            generator.set_state(own)

    return put_back


def _set(kind: str, state: Any, made: Made) -> None:
    if kind.startswith(_MADE):
        if kind.removeprefix(_MADE) in made:
            made[kind.removeprefix(_MADE)].set_state(state)
    elif kind == "python":
        random.setstate(state)
    elif kind == "torch":
        torch.set_rng_state(state)
    elif kind == "numpy":
        import numpy

        numpy.random.set_state(_with_key(state))
    elif torch.cuda.is_available():
        _set_gpus(state["device"], state["states"])


def _set_gpus(device: int, states: list[torch.Tensor]) -> None:
    """This rank's GPU may have another number than before."""
    here = torch.cuda.current_device()
    if here == device:
        for index, state in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
    else:
        torch.cuda.set_rng_state(states[device], here)


def _seed(kind: str, seed: int, made: Made) -> None:
    if kind.startswith(_MADE):
        if kind.removeprefix(_MADE) in made:
            made[kind.removeprefix(_MADE)].manual_seed(seed)
    elif kind == "python":
        random.seed(seed)
    elif kind == "torch":
        torch.default_generator.manual_seed(seed)
    elif kind == "numpy":
        import numpy

        numpy.random.seed(seed % 2**32)
    elif torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _plain(thing: Any) -> Any:
    """NumPy's state with a list for the array in it."""
    if isinstance(thing, dict):
        return {key: _plain(value) for key, value in thing.items()}
    return thing.tolist() if hasattr(thing, "tolist") else thing


def _with_key(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse: the key of a Mersenne Twister is an array."""
    import numpy

    inner = dict(state["state"])
    if "key" in inner:
        inner["key"] = numpy.asarray(inner["key"], dtype=numpy.uint32)
    return {**state, "state": inner}


def _digest(state: Any) -> bytes:
    """Equal for equal states, different otherwise."""
    hashed = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            hashed.update(thing.numpy().tobytes())
        elif isinstance(thing, dict):
            for key in sorted(thing):
                add(key)
                add(thing[key])
        elif isinstance(thing, (list, tuple)):
            for item in thing:
                add(item)
        else:
            hashed.update(repr(thing).encode() + b";")

    add(state)
    return hashed.digest()
