"""HVDLITE_CHECK_SHARED=1: finds changes of shared parameters that hvdlite has not made.

Invariant: between two permitted writes (`writing`: the optimizer's step, load_state_dict,
broadcast_parameters) nobody writes to a shared parameter. After each permitted write the lowest
rank of each host takes a checksum of every shared parameter, and every rank the version that torch
counts of its own tensor; before the next one both must be the same still. The version says which
rank has changed a parameter, also where all have changed it alike. It does not count changes
through `.data` or numpy: these only the checksum finds, without the rank. A process set that writes
has all ranks of each of its hosts.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterable, Iterator
from ctypes import c_char
from dataclasses import dataclass

import torch

from hvdlite.collectives.barrier import barrier
from hvdlite.collectives.differing_ranks import ranks_in_words
from hvdlite.collectives.objects import gather_results
from hvdlite.errors import HorovodInternalError
from hvdlite.shared.memory import place_of
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set

_OFF = contextlib.nullcontext()
_VARIABLE = "HVDLITE_CHECK_SHARED"


@dataclass
class _Watched:
    """A shared parameter or buffer. name: with its kind, as "buffer 'mask'". checksum: on the
    lowest rank of the host."""

    name: str
    tensor: weakref.ref[torch.Tensor]
    version: int = 0
    checksum: int | None = None


# By the tensor's id.
_watched: dict[int, _Watched] = {}


def begin(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """share_parameters has placed these: from now on they are watched. Collective if the check is
    on.

    named: With their kinds, for texts: ("buffer 'mask'", tensor).
    """
    if not _is_on():
        return
    for name, tensor in named:
        _watched[id(tensor)] = _Watched(name, weakref.ref(tensor))
    _note(global_process_set)


def writing(
    what: str, process_set: ProcessSet = global_process_set
) -> contextlib.AbstractContextManager[None]:
    """Around a permitted write to shared parameters, which the members make together. Collective
    at its begin and at its end if the check is on; else it does nothing.

    what: the write, for texts.

    Raises:
        HorovodInternalError: A shared parameter was changed since the last one; on every member.
    """
    return _writing(what, process_set) if _is_on() else _OFF


def verify(what: str, process_set: ProcessSet = global_process_set) -> None:
    """Looks for changes since the last permitted write. Collective if the check is on; else it does
    nothing.

    what: what is about to happen, for texts.

    Raises:
        HorovodInternalError: A shared parameter was changed; on every member.
    """
    if not _is_on():
        return
    # None of the members is computing any more, so what they have changed can be seen.
    barrier(process_set, f"hvdlite.check_shared.{what}")
    found = gather_results(what, _changes, f"hvdlite.check_shared.{what}", process_set)
    members = process_set.ranks or []
    changed: dict[str, list[int]] = {}
    for rank, (by_version, by_checksum) in zip(members, found, strict=True):
        for name in by_checksum:
            changed.setdefault(name, [])
        for name in by_version:
            changed.setdefault(name, []).append(rank)
    if changed:
        # Those with a rank first.
        name = min(changed, key=lambda name: not changed[name])
        ranks = changed[name]
        who = (
            f"by {ranks_in_words(ranks)}" if ranks else "by some rank, not through torch's counter"
        )
        more = f" ({len(changed) - 1} more were changed too)" if len(changed) > 1 else ""
        raise HorovodInternalError(
            f"{what}: {_VARIABLE} found that shared {name} was changed in place {who}, "
            f"since the last step, load_state_dict or broadcast_parameters{more}; all ranks of a "
            "host have this memory in common: let one rank per host change it between two "
            "barriers and call broadcast_parameters, or change it before share_parameters"
        )


@contextlib.contextmanager
def _writing(what: str, process_set: ProcessSet) -> Iterator[None]:
    verify(what, process_set)
    try:
        yield
    except BaseException:
        # How far the write came is not known; and the other members may have met no error.
        for watched in _watched.values():
            watched.version, watched.checksum = -1, None
        raise
    _note(process_set)


def _is_on() -> bool:
    return world.active is not None and world.active.config.check_shared


def _note(process_set: ProcessSet) -> None:
    # All have written, and none goes on before the checksums are taken.
    barrier(process_set, "hvdlite.check_shared.written")
    lowest = world.local_rank() == 0
    for watched, tensor in _alive():
        watched.version = tensor._version
        watched.checksum = _checksum(tensor) if lowest else None
    barrier(process_set, "hvdlite.check_shared.noted")


def _changes() -> tuple[list[str], list[str]]:
    """The names of what this rank has changed by its versions, and of what has changed by its
    checksums."""
    by_version, by_checksum = [], []
    for watched, tensor in _alive():
        if watched.version not in (-1, tensor._version):
            by_version.append(watched.name)
        if watched.checksum is not None and watched.checksum != _checksum(tensor):
            by_checksum.append(watched.name)
    return by_version, by_checksum


def _alive() -> Iterator[tuple[_Watched, torch.Tensor]]:
    """Those that are still there, and still shared: `require_shared` is about the others."""
    for key, watched in list(_watched.items()):
        tensor = watched.tensor()
        if tensor is None or (tensor.numel() and place_of(tensor) is None):
            del _watched[key]
        else:
            yield watched, tensor


def _checksum(tensor: torch.Tensor) -> int:
    """Of the memory from the tensor's first to its last element."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    elems = 1 + sum((size - 1) * stride for size, stride in pairs)
    size_bytes = elems * tensor.element_size()
    return zlib.crc32((c_char * size_bytes).from_address(tensor.data_ptr()))
