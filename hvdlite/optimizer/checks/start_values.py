"""Checks once, before the first step, that all ranks start from the same parameters.

Each rank's hash travels with something that is sent anyway. Only if the hashes differ do the ranks
exchange one for each parameter, so that the error names the first that differs.
"""

from __future__ import annotations

import functools
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence

import torch

from hvdlite.collectives.differing_ranks import ranks_in_words
from hvdlite.collectives.host_sum import HostSum
from hvdlite.errors import HorovodInternalError
from hvdlite.tensor_bytes import flat_bytes
from hvdlite.world import world
from hvdlite.world.teams.team import Team

# On a GPU: the number of words hashed together as a row, and of rows at once.
_WORDS = 1 << 16
_ROWS = 64


class StartValues:
    """The parameters of one optimizer before its first step."""

    def __init__(self, name_of: Callable[[torch.Tensor, int], str]) -> None:
        """name_of: gives the name for a parameter and its index."""
        self._name_of = name_of
        # By parameter: its name, and the hash of its values.
        self._hashes: list[tuple[str, int]] = []
        # The hashes of all members by parameter, once they are exchanged.
        self._details: HostSum | None = None

    def hash(self, params: Sequence[torch.Tensor]) -> int:
        """A hash of the values as they are now: 31 bits, never 0."""
        self._hashes = [(self._name_of(p, index), hash_of(p)) for index, p in enumerate(params)]
        hashes = [each for _, each in self._hashes]
        return zlib.crc32(struct.pack(f"{len(hashes)}I", *hashes)) & 0x7FFFFFFF | 1

    def difference(self, hashes: Sequence[int], team: Team, name: str) -> str | None:
        """Where the members' values differ, in words; None if they don't.

        Every member calls it with the same hashes; it blocks only if these differ. May be called
        again.

        Args:
            hashes: By member; 0 if it does not compare, and then no member does.
            name: The same on every member.

        Raises:
            HorovodInternalError: The exchange failed; on every rank.
        """
        if 0 in hashes or len(set(hashes)) == 1:
            return None
        count = len(self._hashes)
        if self._details is None:
            self._details = HostSum(team, f"{name}.start", team.size * count)
            own = torch.tensor([value for _, value in self._hashes], device="cpu")
            self._details.numbers.view(team.size, count)[team.rank] = own
        self._details.post()
        failure = self._details.wait()
        if failure is not None:
            raise HorovodInternalError(failure)
        names = [each for each, _ in self._hashes]
        rows = self._details.numbers.view(team.size, count).tolist()
        return start_difference([list(zip(names, row, strict=True)) for row in rows], team.ranks)


def report_difference(text: str | None, team: Team) -> None:
    """Warns on member 0 if there is a difference.

    Raises:
        HorovodInternalError: There is one and HVDLITE_STRICT is 1; on every rank.
    """
    if text is None:
        return
    if world.current().config.strict:
        raise HorovodInternalError(text)
    if team.rank == 0:
        warnings.warn(text, stacklevel=2)


def start_difference(found: Sequence[Sequence[tuple[str, int]]], ranks: Sequence[int]) -> str:
    """An error text that names the first parameter that differs, and the ranks.

    found: by member, each parameter's name and hash. ranks: by member, its world rank.
    """
    by_param = list(zip(*found, strict=True))
    differing = [each for each in by_param if len({value for _, value in each}) > 1]
    first = differing[0]
    by_value: dict[int, list[int]] = {}
    for (_, value), rank in zip(first, ranks, strict=True):
        by_value.setdefault(value, []).append(rank)
    groups = "; ".join(map(ranks_in_words, list(by_value.values())[:4]))
    groups += "; …" if len(by_value) > 4 else ""
    return (
        f"DistributedOptimizer: the ranks start from different values: {len(differing)} of "
        f"{len(by_param)} parameters differ, first {first[0][0]!r}, between {groups}; call "
        "broadcast_parameters(model.state_dict(), root_rank=0) on every rank before the first "
        "step, or pass check_start=False to DistributedOptimizer if this is intended"
    )


def hash_of(param: torch.Tensor) -> int:
    """A hash of 32 bits of the parameter's values, bit by bit; 0 if they can't be read."""
    if (
        type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        or param.layout is not torch.strided
        or param.is_meta
        or param.is_quantized
        or (param.numel() and not param.untyped_storage().nbytes())
    ):
        return 0
    values = param.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    in_bytes = flat_bytes(values)
    return zlib.crc32(in_bytes.numpy().data) if in_bytes.is_cpu else hash_on_device(in_bytes)


def hash_on_device(in_bytes: torch.Tensor) -> int:
    """A hash of bytes on a device, which computes it."""
    return zlib.crc32(row_sums(in_bytes).numpy().data) if in_bytes.numel() else 0


def row_sums(in_bytes: torch.Tensor) -> torch.Tensor:
    """Sums of words of 32 bits, each times a random odd number of 64 bits, row by row, which the
    device of the bytes computes. Only these sums, one number per row, are copied to the host."""
    factors = _factors(in_bytes.device)
    step = _ROWS * _WORDS * 4
    rows = [torch.empty(0, dtype=torch.int64, device=in_bytes.device)]
    for begin in range(0, in_bytes.numel(), step):
        part = in_bytes[begin : begin + step]
        part = torch.nn.functional.pad(part, (0, -part.numel() % (_WORDS * 4)))
        # The sums wrap around.
        rows.append((part.view(torch.int32).view(-1, _WORDS) * factors).sum(1))
    return torch.cat(rows).cpu()


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """The same on every rank."""
    generator = torch.Generator("cpu").manual_seed(_WORDS)
    factors = torch.randint(1 << 62, (_WORDS,), generator=generator, device="cpu") * 2 + 1
    return factors.to(device)
