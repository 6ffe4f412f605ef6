"""Compares tensors of all ranks bit by bit: who is wrong, and in what.

    summary:  by rank its number of tensors and two digests, of their forms and of their values
    details:  only if the summaries differ: by rank and tensor its form's hash and its fingerprint
    words:    only if the forms differ: by rank the description of the first tensor that differs
    repair:   only if asked for: the bytes of each tensor that differs, from one rank

Each is one sum of numbers over the ranks, in which each rank has a place of its own. So every rank
learns the same and raises the same, and a rank that has joined, which adds zeros, is no hindrance:
the others compare without it.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvdlite.collectives.differing_ranks import ranks_in_words, which_ranks
from hvdlite.collectives.host_sum import HostSum
from hvdlite.errors import DifferenceError, HorovodInternalError
from hvdlite.optimizer.checks.fingerprints import as_int64, bytes_of, digest, fingerprint
from hvdlite.own_names import renamed
from hvdlite.shared import check
from hvdlite.tensor_bytes import flat_bytes
from hvdlite.world.teams.process_sets import ProcessSet
from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")

_WORDS_BYTES = 256
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


@dataclass
class Entry:
    """A tensor to compare. name: as "exp_avg of fc1.weight". changed: called with the tensor after
    a repair, if it is a copy of what it stands for."""

    name: str
    kind: Kind
    tensor: torch.Tensor
    changed: Callable[[torch.Tensor], None] | None = None

    def form(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        # The fingerprint is another one on another kind of device.
        device = self.tensor.device.type
        place = "" if device == "cpu" else f" on {device}"
        return f"{self.kind.value} {self.name!r} {dtype}{list(self.tensor.shape)}{place}"


class Comparison:
    """One comparison. Every member of the process set makes it, with the same label."""

    def __init__(
        self, what: str, label: str, team: Team, process_set: ProcessSet, repair: bool
    ) -> None:
        """what: the caller, for texts. label: names its operations."""
        self._what = what
        self._label = label
        self._team = team
        self._process_set = process_set
        self._repair = repair
        # How many steps there have been, as the rank with the most of them counts; 0: not known.
        self._steps = 0
        # The members that take part.
        self._members: list[int] = []

    def give_up(self) -> None:
        """Instead of `run`: this rank raises. Collective; the other ranks raise, too."""
        self._summaries([1, 1, 0, 0, 0, 0, self._repair])

    def run(self, entries: Sequence[Entry], steps: int = 0) -> list[str]:
        """Compares. Collective; blocks. Returns the names of what was repaired.

        Raises:
            DifferenceError: The ranks' values differ, and are not to be repaired; on every rank.
            HorovodInternalError: They have other tensors, or a rank has raised; on every rank.
        """
        try:
            known = [
                (each, value) for each in entries if (value := fingerprint_of(each)) is not None
            ]
        except Exception:
            self.give_up()
            raise
        entries = [each for each, _ in known]
        values = [value for _, value in known]
        forms = [_hash(each.form()) for each in entries]
        own = [1, 0, len(entries), as_int64(digest(forms)), as_int64(digest(values)), steps]
        found = self._summaries([*own, self._repair])
        if failed := [rank for rank, row in found if row[1]]:
            raise HorovodInternalError(
                f"{self._what}: {ranks_in_words(failed)} raised an exception before the ranks "
                f"could compare anything; its text is in what that rank prints"
            )
        if all(row[2:5] == found[0][1][2:5] and row[6] == found[0][1][6] for _, row in found):
            return []
        ranks = [rank for rank, _ in found]
        if wishes := which_ranks([f"repair={bool(row[6])}" for _, row in found], ranks):
            raise HorovodInternalError(f"{self._what}: {wishes}; give every rank the same")
        self._steps = max(row[5] for _, row in found)
        count = max(row[2] for _, row in found)
        form_rows, value_rows = self._details(forms, values, count)
        for index in range(count):
            if len({row[index] for row in form_rows}) > 1:
                self._raise_forms(entries, index)
        differing = [i for i in range(count) if len({row[i] for row in value_rows}) > 1]
        differing.sort(key=lambda index: _NAMED_FIRST.index(entries[index].kind))
        if not differing:
            # Cannot be: a digest is a function of what was just found to be the same.
            raise HorovodInternalError(f"{self._what}: the ranks' digests differ, but no tensor")
        verdicts = [_verdict([row[i] for row in value_rows], ranks) for i in differing]
        text = self._text(entries, differing, verdicts[0], count)
        repairs = self._repair and not any(entries[i].tensor.is_quantized for i in differing)
        if not repairs:
            first = entries[differing[0]]
            raise DifferenceError(text, first.name, verdicts[0].wrong, self._steps)
        with check.writing(self._what, self._process_set):
            for index, verdict in zip(differing, verdicts, strict=True):
                self._copy_from(verdict.source, entries[index])
        if self._team.ranks[self._team.rank] == ranks[0]:
            sources = sorted({verdict.source for verdict in verdicts})
            rule = "" if all(v.wrong for v in verdicts) else _RULE
            log.warning("%s. Repaired: copied from %s%s", text, ranks_in_words(sources), rule)
        return [entries[index].name for index in differing]

    def _sum(self, part: str, numbers: torch.Tensor) -> torch.Tensor:
        """The sums over the members. Collective; blocks."""
        total = HostSum(self._team, renamed(self._label, f"{self._label}.{part}"), numbers.numel())
        total.numbers.copy_(numbers.reshape(-1))
        total.post()
        failure = total.wait()
        if failure is not None:
            raise HorovodInternalError(failure)
        return total.numbers.view(numbers.shape)

    def _rows(self, part: str, own: torch.Tensor) -> list[list[int]]:
        """By member that takes part, its row. Collective; blocks."""
        rows = torch.zeros(self._team.size, own.numel(), dtype=torch.int64, device="cpu")
        rows[self._team.rank] = own
        by_member = self._sum(part, rows).tolist()
        return [by_member[member] for member in self._members]

    def _summaries(self, own: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Rank and summary of each member that takes part."""
        self._members = list(range(self._team.size))
        rows = self._rows("summary", _tensor(own))
        self._members = [member for member, row in enumerate(rows) if row[0]]
        return [(self._team.ranks[member], rows[member]) for member in self._members]

    def _details(
        self, forms: Sequence[int], values: Sequence[int], count: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """By member, the hashes of its tensors' forms, 0 where it has no more; and their
        fingerprints."""
        own = torch.zeros(2, count, dtype=torch.int64, device="cpu")
        own[0, : len(forms)] = _tensor([as_int64(number) for number in forms])
        own[1, : len(values)] = _tensor([as_int64(number) for number in values])
        rows = self._rows("details", own.view(-1))
        return [row[:count] for row in rows], [row[count:] for row in rows]

    def _raise_forms(self, entries: Sequence[Entry], index: int) -> None:
        form = entries[index].form() if index < len(entries) else "no such tensor"
        text = form.encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES, b"\0")
        rows = self._rows("words", _tensor(list(text)))
        words = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
        ranks = [self._team.ranks[member] for member in self._members]
        self._raise_missing_state(words, ranks)
        raise HorovodInternalError(
            f"{self._what}: tensor {index} is not the same on all ranks: "
            f"{which_ranks(words, ranks)}; "
            "on every rank pass the same model and optimizer, with state for the same parameters"
        )

    def _raise_missing_state(self, words: Sequence[str], ranks: Sequence[int]) -> None:
        """Raises DifferenceError if only some ranks have a state; words: of each rank's tensor at
        the same place."""
        begin = f"{Kind.STATE.value} "
        having = [rank for rank, word in zip(ranks, words, strict=True) if word.startswith(begin)]
        if not having or len(having) == len(ranks):
            return
        word = words[ranks.index(having[0])]
        named = re.match(rf"{begin}(['\"])(.*)\1 ", word)
        name = named[2] if named else word.removeprefix(begin)
        lacking = [rank for rank in ranks if rank not in having]
        has = "has" if len(having) == 1 else "have"
        lack = "lacks" if len(lacking) == 1 else "lack"
        fewer = () if len(having) == len(lacking) else min(having, lacking, key=len)
        raise DifferenceError(
            f"{self._what}: {ranks_in_words(having)} {has} {word}, which {ranks_in_words(lacking)}"
            f" {lack}. Usual causes: {_STATE_OF_SOME}",
            name,
            tuple(fewer),
            self._steps,
        )

    def _text(
        self, entries: Sequence[Entry], differing: Sequence[int], verdict: _Verdict, count: int
    ) -> str:
        first = entries[differing[0]]
        when = f"after step {self._steps}, " if self._steps else ""
        return (
            f"{self._what}: {when}{first.kind.value} {first.name!r} is not the same on all ranks: "
            f"{verdict.words} ({len(differing)} of {count} tensors differ). "
            f"Usual causes: {_CAUSES[first.kind]}"
        )

    def _copy_from(self, source: int, entry: Entry) -> None:
        """Overwrites the tensor with that of a rank, in place. Collective."""
        memory = _without_repeats(entry.tensor.detach())
        in_bytes = bytes_of(memory)
        assert in_bytes is not None
        size = in_bytes.numel()
        words = torch.zeros(-(-size // 8), dtype=torch.int64, device="cpu")
        is_source = self._team.ranks[self._team.rank] == source
        if is_source:
            words.view(torch.uint8)[:size] = in_bytes.cpu()
        parts = [self._sum("repair", part) for part in torch.split(words, _CHUNK_WORDS)]
        if is_source:
            return
        values = torch.cat(parts).view(torch.uint8)[:size].view(memory.dtype).view(memory.shape)
        if not torch.equal(flat_bytes(values), in_bytes.cpu()):
            memory.copy_(values)
            if entry.changed is not None:
                entry.changed(entry.tensor)


@dataclass(frozen=True)
class _Verdict:
    """Which ranks have which value of a tensor. wrong: the ranks outside the majority; none if
    there is no majority. source: whose value is taken for right."""

    words: str
    wrong: tuple[int, ...]
    source: int


_RULE = ", the lowest one, where no value has a majority: nobody knows which is right"


def _verdict(values: Sequence[int], ranks: Sequence[int]) -> _Verdict:
    by_value: dict[int, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        by_value.setdefault(value, []).append(rank)
    most = max(by_value.values(), key=len)
    if 2 * len(most) > len(ranks):
        wrong = tuple(rank for rank in ranks if rank not in most)
        verb = "differs" if len(wrong) == 1 else "differ"
        words = f"{ranks_in_words(wrong)} {verb} from {ranks_in_words(most)}, the majority"
        return _Verdict(words, wrong, most[0])
    groups = "; ".join(map(ranks_in_words, list(by_value.values())[:4]))
    groups += "; …" if len(by_value) > 4 else ""
    return _Verdict(f"no majority, between {groups}", (), ranks[0])


def _tensor(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _hash(form: str) -> int:
    """Never 0, which stands for a tensor that a rank does not have."""
    found = hashlib.blake2b(form.encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") | 1


def fingerprint_of(entry: Entry) -> int | None:
    """None if its values can't be read."""
    memory = bytes_of(_without_repeats(entry.tensor))
    return None if memory is None else fingerprint(memory)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repeats of `expand`, which can't be written to."""
    if tensor.layout is torch.strided and not tensor.is_quantized:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
