"""Faults on purpose: the text of HVDLITE_FAULT, for hvdrun and for the ranks.

    FAULT; FAULT; …     each FAULT is KIND[:VALUE][@CONDITION=VALUE,CONDITION=VALUE,…]

For example `delay:0.5@rank=1,operation=allreduce,nth=20; kill@rank=2,step=30`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

VARIABLE = "HVDLITE_FAULT"

# Where a fault happens: before an operation is called, before the update of an optimizer's step, in
# a gradient before it is reduced, or in the core.
OPERATION, STEP, GRADIENT, CORE = "operation", "step", "gradient", "core"

# The operations that ranks call by these names; the core has the same words.
OPERATIONS = (
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "join",
    "reduce",
    "reducescatter",
    "scatter",
)
# The functions of MPI that the core calls.
CALLS = ("MPI_Cancel", "MPI_Irecv", "MPI_Isend", "MPI_Test", "MPI_Testsome")
FLIPPED = ("parameter", "state")
MOST_IN_CORE = 16  # as the core's HVDL_MOST_FAULTS
LONGEST_DELAY_S = 86400.0
LARGEST = (1 << 31) - 1
LARGEST_BIT = 127  # of an element of complex128
SHOWN = 64  # how many characters of a wrong word an error quotes

_AT_OPERATIONS = ("rank", "operation", "name", "nth", "times", "step")
_AT_STEPS = ("rank", "name", "step", "times")
_IN_CORE = ("rank", "nth", "times")


class Kind(NamedTuple):
    """A kind of fault.

    value: what stands after the colon: "" (nothing), "seconds", "code", or the choices, of which
        the first is the default.
    conditions: those that it takes.
    """

    value: str | tuple[str, ...]
    conditions: tuple[str, ...]


KINDS: dict[str, Kind] = {
    "bitflip": Kind(FLIPPED, (*_AT_STEPS, "bit")),
    "delay": Kind("seconds", _AT_OPERATIONS),
    "drop": Kind("", _IN_CORE),
    "exit": Kind("code", _AT_OPERATIONS),
    "fail-alloc": Kind("", _IN_CORE),
    "fail-mpi": Kind("", (*_IN_CORE, "call")),
    "kill": Kind("", _AT_OPERATIONS),
    "nan": Kind("", _AT_STEPS),
    "raise": Kind("", _AT_OPERATIONS),
    "stop": Kind("", _AT_OPERATIONS),
}

# The conditions that are numbers, with their range.
_NUMBERS = {
    "rank": (0, LARGEST),
    "nth": (1, LARGEST),
    "times": (1, LARGEST),
    "step": (1, LARGEST),
    "bit": (0, LARGEST_BIT),
}


class Fault(NamedTuple):
    """One fault.

    kind: a key of KINDS. value: the text after the colon, or its default.
    rank: of the world; -1: every rank.
    operation, name: the operation, and its name, that it is about; of a step, the parameter's name.
        Empty: any operation, the first parameter.
    call: the function of MPI. Empty: any of CALLS.
    nth, times: it happens at this event of those that it is about, and at so many in a row.
    step: the step of an optimizer, from 1; 0: it is about operations.
    bit: of a tensor's first element, from the lowest.
    """

    kind: str
    value: str
    rank: int = -1
    operation: str = ""
    name: str = ""
    call: str = ""
    nth: int = 1
    times: int = 1
    step: int = 0
    bit: int = 0

    @property
    def place(self) -> str:
        """OPERATION, STEP, GRADIENT or CORE."""
        if KINDS[self.kind].conditions[: len(_IN_CORE)] == _IN_CORE:
            return CORE
        if self.kind == "nan":
            return GRADIENT
        return STEP if self.step else OPERATION


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a text.

    Raises:
        ValueError: A phrase that says what is wrong, and what is possible instead.
    """
    faults = tuple(_fault(part.strip()) for part in text.split(";") if part.strip())
    in_core = sum(fault.place is CORE for fault in faults)
    if in_core > MOST_IN_CORE:
        raise ValueError(
            f"{in_core} faults that happen in the core; expected at most {MOST_IN_CORE}"
        )
    return faults


def _fault(text: str) -> Fault:
    head, at, tail = text.partition("@")
    word, colon, value = (part.strip() for part in head.partition(":"))
    kind = KINDS.get(word)
    if kind is None:
        raise ValueError(f"{_shown(word)} is no kind of fault; expected one of {', '.join(KINDS)}")
    conditions: dict[str, str] = {}
    for each in tail.split(",") if at else ():
        key, equals, given = (part.strip() for part in each.partition("="))
        if not equals or key not in kind.conditions:
            choices = ", ".join(f"{name}=…" for name in kind.conditions)
            raise ValueError(
                f"{_shown(each.strip())} is no condition of {word}; expected {choices}"
            )
        if key in conditions:
            raise ValueError(f"{word} has the condition {key} twice")
        conditions[key] = _condition(word, key, given)
    wrong = {"nth", "operation", "name"} & conditions.keys()
    if "step" in conditions and wrong and kind.conditions is _AT_OPERATIONS:
        raise ValueError(
            f"{word}: {min(wrong)} is about operations, and step is about an optimizer's steps; "
            "leave out one of them"
        )
    values: dict[str, Any] = {"step": 1} if word in ("bitflip", "nan") else {}
    values |= {key: int(each) if key in _NUMBERS else each for key, each in conditions.items()}
    return Fault(word, _value(word, kind, value, bool(colon)), **values)


def _condition(word: str, key: str, given: str) -> str:
    if key == "operation" and given not in OPERATIONS:
        raise ValueError(
            f"{word}: {_shown(given)} is no operation; expected one of {', '.join(OPERATIONS)}"
        )
    if key == "call" and given not in CALLS:
        raise ValueError(
            f"{word}: {_shown(given)} is no call of the core's; expected one of {', '.join(CALLS)}"
        )
    if key in _NUMBERS:
        least, largest = _NUMBERS[key]
        if not _is_number(given, least, largest):
            raise ValueError(
                f"{word}: {key}={_shown(given)}: expected a whole number from {least} to {largest}"
            )
    elif not given:
        raise ValueError(f"{word}: {key}= is empty; expected a {key}, or leave it out")
    return given


def _value(word: str, kind: Kind, given: str, is_given: bool) -> str:
    if isinstance(kind.value, tuple):
        if is_given and given not in kind.value:
            raise ValueError(f"{word}:{_shown(given)}: expected one of {', '.join(kind.value)}")
        return given or kind.value[0]
    if kind.value == "seconds":
        try:
            is_good = 0 <= float(given) <= LONGEST_DELAY_S
        except ValueError:
            is_good = False
        if not is_good:
            raise ValueError(
                f"{word}:{_shown(given)}: expected seconds from 0 to {LONGEST_DELAY_S:g}, as in "
                f"{word}:0.5"
            )
    elif kind.value == "code":
        if not _is_number(given, 0, 255):
            raise ValueError(
                f"{word}:{_shown(given)}: expected an exit code from 0 to 255, as in {word}:3"
            )
    elif is_given:
        raise ValueError(f"{word} takes no value after a colon, but has {_shown(given)}")
    return given


def _is_number(given: str, least: int, largest: int) -> bool:
    # Python refuses to convert thousands of digits, and int() takes digits of other scripts.
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(LARGEST))):
        return False
    return least <= int(given) <= largest


def _shown(word: str) -> str:
    return repr(word if len(word) <= SHOWN else word[:SHOWN] + "...")
