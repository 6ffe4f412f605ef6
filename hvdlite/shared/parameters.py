"""share_parameters: one copy of a model's parameters per host."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hvdlite.collectives.barrier import barrier
from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.collectives.objects import gather_results
from hvdlite.collectives.posting import require_memory
from hvdlite.errors import HorovodInternalError
from hvdlite.shared import check, loading, spawned
from hvdlite.shared.changed_buffers import changed_by_forward
from hvdlite.shared.memory import (
    ALIGNMENT_BYTES,
    PAGE_BYTES,
    Place,
    Region,
    open_region,
    place_at,
    place_of,
)
from hvdlite.world import world
from hvdlite.world.teams.process_sets import global_process_set, team_of

_FORM = "share_parameters"


def share_parameters(model: torch.nn.Module, buffers: bool = False) -> None:
    """Moves the model's parameters into memory that the ranks of a host share. Blocks.

    Every rank calls it, with the same model. Then each host has one copy of each parameter, and all
    its ranks see the same pages, their forked children too. The `Parameter` objects stay the same,
    so optimizers, hooks, gradients, tied weights and views of one another keep working; a tensor
    made from a parameter before, as by `detach()`, keeps the old memory. The values are those of
    the lowest rank of each host. Already shared parameters stay where they are.

    From now on a rank must not change a parameter in place by itself: the others see it at once,
    and if all do, it happens several times. The optimizer's step, `load_state_dict` (every rank
    calls it) and `broadcast_parameters` write once per host; HVDLITE_CHECK_SHARED=1 finds other
    changes. Anything that gives parameters other memory, such as `model.to(dtype)`, ends the
    sharing: call `share_parameters` again afterwards.

    Args:
        model: Its parameters must be dense, in host memory, and have the same names, shapes, dtypes
            and strides on every rank.
        buffers: Share the model's buffers too.

    Raises:
        ValueError: A parameter that can't be shared, for instance on a GPU; a buffer that forward
            changes, such as BatchNorm's. The text names it.
        HorovodInternalError: The ranks' models differ, or the ranks of a host can't share memory;
            on every rank. Or another rank has raised.
        MemoryError: A host has too little memory; on every rank.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> hvd.share_parameters(model)
        >>> hvd.is_shared(model.weight)
        True
    """
    team = team_of(_FORM, global_process_set)
    entries: list[_Entry] = []

    def look() -> list[_Seen]:
        entries.extend(_entries(model, buffers))
        return _seen(entries)

    everyones = gather_results(_FORM, look, f"hvdlite.{_FORM}", global_process_set)
    if difference := _difference(everyones, team.ranks):
        raise HorovodInternalError(f"{_FORM}: {difference}")
    hosts = world.current().placement.hosts
    sizes = [_sizes_to_move([everyones[rank] for rank in ranks]) for ranks in hosts]
    spawned.allow()
    if any(sizes):
        own = next(size for size, ranks in zip(sizes, hosts, strict=True) if team.rank in ranks)
        total_bytes = sum(map(_aligned, own.values()))
        region = open_region(_FORM, total_bytes, "share a smaller model")
        _move(entries, _seen(entries), own, region)
    named = [(entry.name, entry.tensor) for entry in entries]
    _note(named)
    loading.add_hooks(model)
    check.begin((f"{entry.kind} {entry.name!r}", entry.tensor) for entry in entries)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in memory of `share_parameters`: one copy per host.

    Also true of views of such tensors; false of a `shared_tensor`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> hvd.is_shared(model.weight)
        False
    """
    return place_of(tensor) is not None or (tensor.numel() == 0 and id(tensor) in _noted)


def shares_any() -> bool:
    """Whether this process has shared parameters at all; cheap."""
    return bool(_noted)


def require_shared(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises RuntimeError if one of these was shared and is no longer.

    Not collective. Cheap: a look into a dict, and at the tensor's address.
    """
    for name, tensor in named:
        noted = _noted.get(id(tensor))
        if noted is not None and tensor.data_ptr() != noted.address:
            raise RuntimeError(
                f"parameter {name!r} was placed into shared memory by share_parameters, and rank "
                f"{world.rank()} has given it other memory since, as model.to(), .half() or "
                "share_memory() do; call hvd.share_parameters(model) again after that, on every "
                "rank"
            )


@dataclass(frozen=True)
class _Entry:
    """A parameter or buffer to be shared."""

    kind: str
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class _Form:
    """What must be the same about an entry on all ranks.

    storage: its number, by first use. offset: where the entry begins in it, in elements.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int
    storage_bytes: int

    def in_words(self, others: list[_Form]) -> str:
        """Its dtype and shape, with everything else in which it differs from the others."""
        text = f"{self.dtype}{list(self.shape)}"
        if any((o.kind, o.name) != (self.kind, self.name) for o in others):
            text = f"{self.kind} {self.name!r} {text}"
        others = [o for o in others if (o.dtype, o.shape) == (self.dtype, self.shape)]
        if any(other.strides != self.strides for other in others):
            text += f" with strides {list(self.strides)}"
        if any(other.storage != self.storage for other in others):
            text += f" in storage {self.storage} of the model"
        if any(other.offset != self.offset for other in others):
            text += f" at element {self.offset} of its storage"
        if any(other.storage_bytes != self.storage_bytes for other in others):
            text += f" in a storage of {self.storage_bytes} bytes"
        return text


@dataclass(frozen=True)
class _Seen:
    """An entry on one rank. place: of its storage, where that is shared already."""

    form: _Form
    place: Place | None


def _entries(model: object, buffers: bool) -> list[_Entry]:
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{_FORM}: expected a torch.nn.Module, got {type(model).__name__}")
    if buffers:
        for name, why in changed_by_forward(model):
            raise ValueError(
                f"{_FORM}: buffers=True, but buffer {name!r} is changed by forward: {why}; every "
                "rank would write it. Use buffers=False"
            )
    entries = [_Entry("parameter", name, tensor) for name, tensor in model.named_parameters()]
    if buffers:
        entries += [_Entry("buffer", name, tensor) for name, tensor in model.named_buffers()]
    for entry in entries:
        _require_ordinary(entry)
    return entries


def _require_ordinary(entry: _Entry) -> None:
    tensor = entry.tensor
    what = f"{_FORM}: {entry.kind} {entry.name!r}"
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"{what} is not initialized yet; run a forward pass first")
    if tensor.device.type == "meta":
        raise ValueError(f"{what} is on the device meta; first give it memory, as by to_empty()")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(
            f"{what} is a {type(tensor).__name__}; expected an ordinary tensor, not one that is "
            "sharded or wrapped"
        )
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{what} is on {tensor.device}; only parameters in host memory can be shared"
        )
    require_memory(what, tensor)
    if tensor.is_quantized:
        raise ValueError(f"{what} is quantized; only dense tensors of numbers can be shared")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} is a lazily conjugated or negated view; first clone() it")
    if tensor.is_inference():
        raise ValueError(f"{what} was made in inference_mode; first clone() it outside")


def _seen(entries: list[_Entry]) -> list[_Seen]:
    numbers: dict[object, int] = {}
    seen = []
    for entry in entries:
        tensor = entry.tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        form = _Form(
            entry.kind,
            entry.name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.stride(),
            numbers.setdefault(address or storage._cdata, len(numbers)),
            int(tensor.storage_offset()),
            storage.nbytes(),
        )
        seen.append(_Seen(form, place_at(address) if address else None))
    return seen


def _difference(everyones: list[list[_Seen]], ranks: tuple[int, ...]) -> str | None:
    """The first difference between the ranks' models, the same text on every rank; or None."""
    for i in range(max(map(len, everyones))):
        found = [seen[i].form if i < len(seen) else None for seen in everyones]
        if any(form != found[0] for form in found):
            there = [form for form in found if form is not None]
            words = [form.in_words(there) if form else "nothing there" for form in found]
            what = f"{there[0].kind} {there[0].name!r}"
            return f"{what} differs: {which_ranks(words, ranks)}; make the same model on every rank"
    return None


def _sizes_to_move(everyones: list[list[_Seen]]) -> dict[int, int]:
    """The storages that the ranks of a host do not have in common yet: their sizes, by number."""
    sizes: dict[int, int] = {}
    for seen in zip(*everyones, strict=True):
        places = {one.place for one in seen}
        form = seen[0].form
        if form.storage_bytes and (len(places) > 1 or None in places):
            sizes[form.storage] = max(sizes.get(form.storage, 0), form.storage_bytes)
    return sizes


def _move(entries: list[_Entry], seen: list[_Seen], sizes: dict[int, int], region: Region) -> None:
    """Gives entries their place in the region. Collective over the world.

    sizes: of the storages to move, by number.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    offset = PAGE_BYTES
    for number, size_bytes in sizes.items():
        storages[number] = region.storage(offset, size_bytes)
        offset += _aligned(size_bytes)
    if world.local_rank() == 0:
        copied = set()
        for entry, one in zip(entries, seen, strict=True):
            number = one.form.storage
            if number in storages and number not in copied:
                storages[number].copy_(entry.tensor.untyped_storage())
                copied.add(number)
    barrier(name=f"hvdlite.{_FORM}.filled")
    for entry, one in zip(entries, seen, strict=True):
        if one.form.storage in storages:
            old = entry.tensor
            # The tensor itself stays, with its gradient, hooks and whatever refers to it.
            old.data = torch.empty(0, dtype=old.dtype, device="cpu").set_(
                storages[one.form.storage], old.storage_offset(), old.shape, old.stride()
            )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class _Noted:
    """A tensor that was shared, while it lives, and its address then."""

    tensor: weakref.ref[torch.Tensor]
    address: int


# By the tensor's id.
_noted: dict[int, _Noted] = {}


def _note(named: list[tuple[str, torch.Tensor]]) -> None:
    for _, tensor in named:
        key = id(tensor)

        def forget(_: object, key: int = key) -> None:
            _noted.pop(key, None)

        _noted[key] = _Noted(weakref.ref(tensor, forget), tensor.data_ptr())
