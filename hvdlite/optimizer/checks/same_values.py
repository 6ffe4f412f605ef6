"""Compares tensors of all ranks bit by bit: who is wrong, and in what.

    summary:  by rank a hash of what it has
    details:  only if the hashes differ: by rank and tensor its name, its form and its fingerprint
    repair:   only if asked for: the bytes of each tensor that differs, from one rank

Each is a sum of numbers over the ranks, in which each rank has a place of its own. So every rank
learns the same and raises the same, and a rank that has joined, which adds zeros, is no hindrance:
the others compare without it.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hvdlite.collectives.differing_ranks import ranks_in_words, which_ranks
from hvdlite.collectives.host_sum import HostSum
from hvdlite.errors import DifferenceError, HorovodInternalError
from hvdlite.optimizer.checks.fingerprints import bytes_of, fingerprint
from hvdlite.optimizer.checks.rows import Exchange, Rows
from hvdlite.own_names import renamed
from hvdlite.shared import check
from hvdlite.tensor_bytes import flat_bytes
from hvdlite.world.teams.process_sets import ProcessSet
from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")

_CHUNK_WORDS = 1 << 20


class Kind(enum.Enum):
    """What a tensor is to the model."""

    PARAMETER = "parameter"
    STATE = "state"
    OPTION = "option"
    BUFFER = "buffer"


_STATE_OF_SOME = (
    "some ranks have loaded a checkpoint without broadcast_optimizer_state after it, or made a "
    "step alone"
)
# Why ranks usually differ in it.
_CAUSES = {
    Kind.PARAMETER: (
        "some ranks have loaded or changed parameters outside optimizer.step(), as inside `if "
        "hvd.rank() == 0`, without broadcast_parameters after it; some rank has made a step alone; "
        "or a bit of memory has flipped"
    ),
    Kind.STATE: f"{_STATE_OF_SOME}; or a bit of memory has flipped",
    Kind.OPTION: (
        "a scheduler that looks at this rank's own loss, or that some ranks have called more "
        f"often; or {_STATE_OF_SOME}"
    ),
    Kind.BUFFER: (
        "BatchNorm's statistics are those of each rank's own batches (convert_sync_batchnorm makes "
        "them the same); otherwise a module that changes its buffers by the data or by random "
        "numbers, or a bit of memory has flipped"
    ),
}


# Other options, or another state, make other parameters: they are named first.
_NAMED_FIRST = (Kind.OPTION, Kind.STATE, Kind.PARAMETER, Kind.BUFFER)
_STATE = Kind.STATE.value


class Described(NamedTuple):
    """What a rank tells of a tensor. form: dtype, shape, and the kind of its device, on which its
    fingerprint depends."""

    kind: str
    name: str
    form: str
    fingerprint: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} {self.form}" if self.kind else "no such tensor"


_NONE = Described("", "", "", 0)


@dataclass
class Entry:
    """A tensor to compare. name: as "exp_avg of fc1.weight". changed: called with the tensor after
    a repair, if it is a copy of what it stands for."""

    name: str
    kind: Kind
    tensor: torch.Tensor
    changed: Callable[[torch.Tensor], None] | None = None

    def described(self) -> Described | None:
        """None if its values can't be read."""
        memory = bytes_of(_without_repeats(self.tensor))
        if memory is None:
            return None
        form = f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"
        if not self.tensor.is_cpu:
            form += f" on {self.tensor.device.type}"
        return Described(self.kind.value, self.name, form, fingerprint(memory))


def described(entries: Iterable[Entry]) -> tuple[list[Entry], list[Described]]:
    """The entries whose values can be read, and what is told of them."""
    both = [(each, found) for each in entries if (found := each.described()) is not None]
    return [each for each, _ in both], [found for _, found in both]


class Comparison:
    """One comparison. Every member of the process set makes it, with the same label."""

    def __init__(
        self, what: str, label: str, team: Team, process_set: ProcessSet, repair: bool = False
    ) -> None:
        """what: the caller, for texts. label: names its operations."""
        self._what = what
        self._label = label
        self._team = team
        self._process_set = process_set
        self._repair = repair
        # What has been posted: a second `run`, after an interruption, does not post it again.
        self._summaries: Rows | None = None
        self._details: Exchange | None = None
        # After `run`: the ranks have the same values, in another order.
        self.is_order = False

    def run(self, entries_of: Callable[[], Iterable[Entry]], steps: int = 0) -> list[str]:
        """Compares. Collective; blocks. Returns the names of what was repaired.

        entries_of: gives what to compare; what it raises is raised here, and the other ranks raise,
            too. steps: that there have been; 0: not known.

        Raises:
            DifferenceError: The ranks' values differ, and are not to be repaired; on every rank.
            HorovodInternalError: They have other tensors, or a rank has raised; on every rank.
        """
        try:
            entries, own = described(entries_of())
        except Exception:
            self._summaries_of([1, 0, 0, self._repair])
            raise
        found = self._summaries_of([0, hash_of(own), steps, self._repair])
        if failed := [rank for rank, row in found.items() if row[0]]:
            raise HorovodInternalError(
                f"{self._what}: {ranks_in_words(failed)} raised an exception before the ranks "
                "could compare anything; its text is in what that rank prints"
            )
        if wishes := which_ranks([f"repair={bool(row[3])}" for row in found.values()], list(found)):
            raise HorovodInternalError(f"{self._what}: {wishes}; give every rank the same")
        if len({row[1] for row in found.values()}) == 1:
            return []
        if self._details is None:
            self._details = Exchange(self._team, self._name("details"), own)
        everyones: dict[int, list[Described]] = self._details.exchange()
        ranks, steps = list(everyones), max(row[2] for row in found.values())
        rows = list(itertools.zip_longest(*everyones.values(), fillvalue=_NONE))
        for index, row in enumerate(rows):
            self._require_alike(index, row, ranks, steps)
        differing = [index for index, row in enumerate(rows) if len(set(row)) > 1]
        differing.sort(key=lambda index: _NAMED_FIRST.index(entries[index].kind))
        values = ([each.fingerprint for each in found] for found in everyones.values())
        self.is_order = len({tuple(sorted(each)) for each in values}) == 1
        verdicts = [_verdict([each.fingerprint for each in rows[i]], ranks) for i in differing]
        first, (words, wrong, _) = entries[differing[0]], verdicts[0]
        text = (
            f"{self._what}: {f'after step {steps}, ' if steps else ''}{first.kind.value} "
            f"{first.name!r} is not the same on all ranks: {words} ({len(differing)} of "
            f"{len(rows)} tensors differ). Usual causes: {_CAUSES[first.kind]}"
        )
        if not self._repair or any(entries[i].tensor.is_quantized for i in differing):
            raise DifferenceError(text, first.name, wrong, steps)
        with check.writing(self._what, self._process_set):
            for index, (_, _, source) in zip(differing, verdicts, strict=True):
                self._copy_from(source, entries[index])
        if self._rank() == ranks[0]:
            sources = sorted({source for _, _, source in verdicts})
            rule = "" if all(wrong for _, wrong, _ in verdicts) else _RULE
            log.warning("%s. Repaired: copied from %s%s", text, ranks_in_words(sources), rule)
        return [entries[index].name for index in differing]

    def _name(self, part: str) -> str:
        return renamed(self._label, f"{self._label}.{part}")

    def _rank(self) -> int:
        return self._team.ranks[self._team.rank]

    def _summaries_of(self, own: Sequence[int]) -> dict[int, list[int]]:
        if self._summaries is None:
            self._summaries = Rows(self._team, self._name("summary"), len(own))
            self._summaries.put(own)
        return {rank: row.tolist() for rank, row in self._summaries.exchange().items()}

    def _require_alike(
        self, index: int, row: Sequence[Described], ranks: Sequence[int], steps: int
    ) -> None:
        """Raises an error if the ranks have other tensors at this index."""
        words = which_ranks(list(map(str, row)), ranks)
        if not words:
            return
        having = [rank for rank, each in zip(ranks, row, strict=True) if each.kind == _STATE]
        lacking = [rank for rank in ranks if rank not in having]
        if not having or not lacking:
            raise HorovodInternalError(
                f"{self._what}: tensor {index} is not the same on all ranks: {words}; on every "
                "rank pass the same model and optimizer, with state for the same parameters"
            )
        state = row[ranks.index(having[0])]
        fewer = () if len(having) == len(lacking) else min(having, lacking, key=len)
        raise DifferenceError(
            f"{self._what}: {state} is there on {ranks_in_words(having)}, but not on "
            f"{ranks_in_words(lacking)}. Usual causes: {_STATE_OF_SOME}",
            state.name,
            tuple(fewer),
            steps,
        )

    def _copy_from(self, source: int, entry: Entry) -> None:
        """Overwrites the tensor with that of a rank, in place. Collective."""
        memory = _without_repeats(entry.tensor.detach())
        in_bytes = bytes_of(memory)
        assert in_bytes is not None
        size = in_bytes.numel()
        words = torch.zeros(-(-size // 8), dtype=torch.int64, device="cpu")
        if self._rank() == source:
            words.view(torch.uint8)[:size] = in_bytes.cpu()
        for part in torch.split(words, _CHUNK_WORDS):
            total = HostSum(self._team, self._name("repair"), part.numel())
            total.numbers.copy_(part)
            total.post()
            failure = total.wait()
            if failure is not None:
                raise HorovodInternalError(failure)
            part.copy_(total.numbers)
        values = words.view(torch.uint8)[:size].view(memory.dtype).view(memory.shape)
        if not torch.equal(flat_bytes(values), in_bytes.cpu()):
            memory.copy_(values)
            if entry.changed is not None:
                entry.changed(entry.tensor)


_RULE = ", the lowest one, where no value has a majority: nobody knows which is right"


def _verdict(values: Sequence[int], ranks: Sequence[int]) -> tuple[str, tuple[int, ...], int]:
    """Which ranks have which value of a tensor, in words; the ranks outside the majority, none if
    there is no majority; and the rank whose value is taken for right."""
    by_value: dict[int, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        by_value.setdefault(value, []).append(rank)
    most = max(by_value.values(), key=len)
    if 2 * len(most) > len(ranks):
        wrong = tuple(rank for rank in ranks if rank not in most)
        verb = "differs" if len(wrong) == 1 else "differ"
        words = f"{ranks_in_words(wrong)} {verb} from {ranks_in_words(most)}, the majority"
        return words, wrong, most[0]
    groups = "; ".join(map(ranks_in_words, list(by_value.values())[:4]))
    groups += "; …" if len(by_value) > 4 else ""
    return f"no majority, between {groups}", (), ranks[0]


def hash_of(own: Sequence[Described]) -> int:
    """Of 63 bits, never 0."""
    return (
        int.from_bytes(hashlib.blake2b(repr(own).encode(), digest_size=8).digest(), "little") >> 1
        | 1
    )


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repeats of `expand`, which can't be written to."""
    if tensor.layout is torch.strided and not tensor.is_quantized:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
