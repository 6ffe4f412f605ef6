"""Checks once, before the first step, that all ranks start from the same parameters, and the same
state and options of the optimizer.

Each rank's hash travels with something that is sent anyway. Only if the hashes differ do the ranks
exchange one for each parameter, so that the error names the first that differs.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvdlite.collectives.differing_ranks import ranks_in_words
from hvdlite.collectives.host_sum import HostSum
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.checks.fingerprints import row_sums
from hvdlite.optimizer.checks.same_values import Comparison, Entry, fingerprint_of
from hvdlite.own_names import own_name
from hvdlite.tensor_bytes import flat_bytes
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet
from hvdlite.world.teams.team import Team


@dataclass(frozen=True)
class Difference:
    """text: what differs. is_order: the ranks have the same parameters in another order, which is
    never intended."""

    text: str
    is_order: bool = False


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
        # By parameter: its name, and the hash of its values.
        self._hashes: list[tuple[str, int]] = []
        # The hashes of all members by parameter, once they are exchanged.
        self._details: HostSum | None = None

    def hash(self, params: Sequence[torch.Tensor]) -> int:
        """A hash of the values as they are now: 31 bits, never 0."""
        self._hashes = [(self._name_of(p, index), hash_of(p)) for index, p in enumerate(params)]
        hashes = [each for _, each in self._hashes]
        found = zlib.crc32(struct.pack(f"{len(hashes)}I", *hashes))
        for entry in self._besides():
            found = zlib.crc32(f"{entry.form()} {fingerprint_of(entry)}".encode(), found)
        return found & 0x7FFFFFFF | 1

    def difference(self, hashes: Sequence[int], team: Team, name: str) -> Difference | None:
        """Where the members' values differ; None if they don't.

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
            words = "the comparison of the first parameter values of {}"
            self._details = HostSum(team, own_name(name, "start", words), team.size * count)
            own = torch.tensor([value for _, value in self._hashes], device="cpu")
            self._details.numbers.view(team.size, count)[team.rank] = own
        self._details.post()
        failure = self._details.wait()
        if failure is not None:
            raise HorovodInternalError(failure)
        names = [each for each, _ in self._hashes]
        rows = self._details.numbers.view(team.size, count).tolist()
        if all(row == rows[0] for row in rows):
            return self._difference_besides(team, name)
        return start_difference([list(zip(names, row, strict=True)) for row in rows], team.ranks)

    def _difference_besides(self, team: Team, name: str) -> Difference | None:
        """The parameters are the same."""
        label = own_name(name, "besides", "the comparison of the first state of {}")
        comparison = Comparison(
            "DistributedOptimizer, at the start", label, team, self._process_set, False
        )
        try:
            comparison.run(self._besides())
        except HorovodInternalError as error:
            return Difference(
                f"{error}; call broadcast_optimizer_state(optimizer, root_rank=0) on every rank "
                "before the first step, or pass check_start=False to DistributedOptimizer if this "
                "is intended"
            )
        return None


def report_difference(found: Difference | None, team: Team) -> None:
    """Warns on member 0 if there is a difference.

    Raises:
        HorovodInternalError: There is one, of the order or while HVDLITE_STRICT is 1; on every
            rank.
    """
    if found is None:
        return
    if found.is_order or world.current().config.strict:
        raise HorovodInternalError(found.text)
    if team.rank == 0:
        warnings.warn(found.text, stacklevel=2)


def start_difference(
    found: Sequence[Sequence[tuple[str, int]]], ranks: Sequence[int]
) -> Difference:
    """Names the first parameter that differs, and the ranks.

    found: by member, each parameter's name and hash. ranks: by member, its world rank.
    """
    by_param = list(zip(*found, strict=True))
    differing = [each for each in by_param if len({value for _, value in each}) > 1]
    first = differing[0]
    by_value: dict[int, list[int]] = {}
    for (_, value), rank in zip(first, ranks, strict=True):
        by_value.setdefault(value, []).append(rank)
    if len({tuple(sorted(value for _, value in each)) for each in found}) == 1:
        (value, some), (_, others) = list(by_value.items())[:2]
        there = next(name for name, each in found[ranks.index(others[0])] if each == value)
        return Difference(
            "DistributedOptimizer: the ranks have the same parameters in another order: "
            f"{first[0][0]!r} of {ranks_in_words(some)} is {there!r} of {ranks_in_words(others)}, "
            "by their values; on every rank make the optimizer over the same parameters in the "
            "same order, and pass named_parameters=model.named_parameters()",
            is_order=True,
        )
    groups = "; ".join(map(ranks_in_words, list(by_value.values())[:4]))
    groups += "; …" if len(by_value) > 4 else ""
    return Difference(
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
