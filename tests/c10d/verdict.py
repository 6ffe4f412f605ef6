"""Which outcome of a test is a defect. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tests.c10d.one_test import PASSED, SKIPPED, Outcome


@dataclass(frozen=True)
class Excepted:
    """A line of exceptions.txt: a test that may fail."""

    name: str  # of the backend
    ranks: tuple[int, ...]
    test: str
    reason: str


def read_exceptions(text: str) -> list[Excepted]:
    """Lines of a backend's name, numbers of ranks, a test and the reason; # begins a comment.

    >>> read_exceptions("gloo 3,4 test_x wants Gloo's name in a log")
    [Excepted(name='gloo', ranks=(3, 4), test='test_x', reason="wants Gloo's name in a log")]
    """
    found = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            fields = line.split(maxsplit=3)
            if len(fields) < 4:
                raise ValueError(f"not a name, numbers of ranks, a test and a reason: {line}")
            name, ranks, test, reason = fields
            found.append(Excepted(name, tuple(map(int, ranks.split(","))), test, reason))
    return found


def defects(
    outcomes: Iterable[Outcome], must_pass: Collection[str], excepted: Mapping[str, str]
) -> list[str]:
    """A line for each. A test that must pass does not; another one fails; or a test of `excepted`
    (its reason by name) passes, or is none of torch's: so the list of exceptions stays true.

    must_pass: of the reference, without those that this run leaves out.
    """
    found = []
    seen = {outcome.test: outcome for outcome in outcomes}
    for name, outcome in seen.items():
        passed, skipped = outcome.status == PASSED, outcome.status == SKIPPED
        if name in excepted:
            if passed:
                found.append(f"{name}: passes; take it out of exceptions.txt")
        elif not passed and not skipped:
            found.append(f"{name}: {outcome.status} after {outcome.seconds:g} s\n{outcome.text}")
        elif skipped and name in must_pass:
            found.append(f"{name}: skipped, but it must pass: {outcome.text}")
    for name in sorted({*must_pass, *excepted} - set(seen)):
        found.append(f"{name}: torch has no such test any more")
    return found
