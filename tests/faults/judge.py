"""Whether the culprit was named, and who was blamed wrongly. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Texts that blame somebody, with what names those in the first group.
_BLAMES = (
    r"(?:has waited|still waits, after) \d+ s,? for ([^;]*); called by",
    r"has made no progress for [^;]*; it waits [^;]*?for (rank \d+ on|server\d+)",
    r"^hvdrun: (rank \d+) on \S+ (?:ended|was ended|had ended|has not|has closed)",
    r"^hvdrun: (?:ranks? [\d,-]+) waits? in [^;]* for (ranks? [\d,-]+), which",
    r"^hvdrun: (ranks? [\d,-]+) on [^:]* arrives? last",
    r"^hvdrun: ([\w, ]+) (?:has|have) given no sign of life",
    r"^hvdrun: (server\d+) is lost",
    r"not the same on all ranks: (ranks? [\d,-]+) differs? from",
    r"in the gradient of \S+ on (rank \d+)",
    r"start from different values: .*(rank \d+)",
)

# A host that has had no answer, and says that it may be its own link.
_LINK = re.compile(r"Or is the link between it and (server\d+) slow\?")


def blamed(text: str) -> Iterator[str]:
    """Names of ranks and hosts: 'rank 1', 'server2'."""
    for pattern in _BLAMES:
        for found in re.finditer(pattern, text, re.MULTILINE):
            # What a rank is said to have done is no blame.
            words = re.sub(r"\([^()]*\)", "", found[1])
            for numbers in re.findall(r"ranks? ([\d, -]+)", words):
                yield from (f"rank {number}" for number in _numbers(numbers))
            yield from re.findall(r"server\d+(?=, which|$| and |, server)", words)


def _numbers(spans: str) -> Iterator[int]:
    for part in re.findall(r"\d+(?:-\d+)?", spans):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def wrong_names(text: str, right: set[str]) -> list[str]:
    """right: who may be blamed. Of two hosts between which a link may be slow, one is enough."""
    lines = [line for line in text.splitlines() if not right & set(_LINK.findall(line))]
    return sorted(set(blamed("\n".join(lines))) - right)
