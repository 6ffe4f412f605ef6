"""A fault: a training script in which one rank has it, and what hvdrun must say of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from string import Template
from textwrap import dedent, indent

CULPRIT = 1
RANKS = 3
# What a script prints when its fault begins.
BEGINS = "the fault begins"
# Ends the script's line that is to be named.
MARK = "  # the line"
STALL_S = 2

LOOP = Template("""\
import contextlib, ctypes, fcntl, itertools, os, pathlib, signal, socket, subprocess, sys
import tempfile, threading, time
import torch
import hvdlite as hvd

RANK, CULPRIT = int(os.environ["RANK"]), $culprit
BATCH = torch.ones(8, 4)

def begins():
    print("$begins", flush=True)

$code

def train():
$before
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
$model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step, batch in enumerate($data):
        optimizer.zero_grad()
        if step == 3 and RANK == CULPRIT:
            begins()
$fault
        loss = model(batch).sum()
        loss.backward()
$backward
        optimizer.step()
$step
        time.sleep(0.02)
$after

train()
""")


@dataclass(frozen=True)
class Fault:
    """What the script does is in pieces of LOOP.

    says: patterns, all of which hvdrun's stderr must have; in them {rank}, {host} and {line} are
    the culprit's; {waited} is the line where the ranks wait for each other, {stepped}
    that of the optimizer's step. blames: the ranks that
    may be blamed, if more than the culprit. hosts: on which numbers of hosts it is run. outside:
    who makes the fault, if not the script.
    """

    name: str
    says: tuple[str, ...]
    code: str = ""
    before: str = ""
    model: str = ""
    data: str = "itertools.repeat(BATCH)"
    fault: str = ""
    backward: str = ""
    step: str = ""
    after: str = ""
    culprit: int = CULPRIT
    limit_s: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    hosts: tuple[int, ...] = (1, 3)
    blames: tuple[int, ...] | None = None
    outside: Callable[[Job], None] | None = None
    lacking: Callable[[], str] = str  # why it can't be made on this machine; "": it can

    @property
    def script(self) -> str:
        def piece(text: str, depth: int) -> str:
            return indent(dedent(text).strip("\n"), 4 * depth * " ")

        return LOOP.substitute(
            culprit=self.culprit,
            begins=BEGINS,
            code=piece(self.code, 0),
            before=piece(self.before, 1),
            model=piece(self.model, 1),
            data=self.data,
            fault=piece(self.fault, 3),
            backward=piece(self.backward, 2),
            step=piece(self.step, 2),
            after=piece(self.after, 1),
        )

    @property
    def line(self) -> int:
        """The number of the line that is to be named; 0: there is none."""
        lines = self.script.splitlines()
        return next((n for n, text in enumerate(lines, 1) if text.endswith(MARK)), 0)

    def _line_of(self, call: str) -> int:
        return 1 + self.script.splitlines().index(f"        {call}")

    def host(self, hosts: int) -> str:
        return "localhost" if hosts == 1 else f"server{self.culprit + 1}"

    def patterns(self, hosts: int) -> Sequence[re.Pattern[str]]:
        values = {
            "rank": str(self.culprit),
            "host": self.host(hosts),
            "line": str(self.line),
            "waited": str(self._line_of("loss.backward()")),
            "stepped": str(self._line_of("optimizer.step()")),
        }
        texts = [
            re.sub(r"\{(rank|host|line|waited|stepped)\}", lambda found: values[found[1]], text)
            for text in self.says
        ]
        return [re.compile(text, re.MULTILINE) for text in texts]


@dataclass(frozen=True)
class Job:
    """What runs while a fault is made from outside. pid: of the culprit's process, as it is seen
    here; cluster: does `cluster WORDS` for the hosts of the rig."""

    pid: int
    host: str
    cluster: Callable[..., str]
    at_end: Callable[[Callable[[], None]], None]  # called while the job still runs
    afterwards: Callable[[Callable[[], None]], None]  # called when it has ended


# Lines of a stack before the one that is wanted.
_CALLS = r"\n(?:        .*\n)*?"


def is_held(does: str) -> tuple[str, ...]:
    """What hvdrun says of a rank that can't be asked where it is: the line from which it last
    waited. With one rank per host, only its host is known not to answer."""
    missing = r"(rank {rank} on |{host}, which does not answer)"
    where = rf"(?:{does}).*it last waited for hvdlite here:{_CALLS}"
    return (
        rf"has (waited|made no progress for) .*\b{missing}",
        rf"^    rank {{rank}} on {{host}} {where}        \S*train\.py:{{waited}} in ",
    )


def waits(does: str, *more: str) -> tuple[str, ...]:
    """The same of another rank: who, where, what it does, and the line."""
    return (
        r"has (waited|made no progress for) .*\brank {rank} on \S+ ",
        rf"^    rank {{rank}} on {{host}} (?:{does}).*{_CALLS}        \S*train\.py:{{line}} in ",
        *more,
    )


def ends(how: str, *more: str) -> tuple[str, ...]:
    return rf"^hvdrun: rank {{rank}} on {{host}} (?:{how})", *more


TRACEBACK = r'File "[^"]*train\.py", line {line}, in '
# What hvdlite itself raises, in its step or where the ranks wait for each other.
RAISED_IN_STEP = r'File "[^"]*train\.py", line {stepped}, in train'
RAISED_WAITING = r'File "[^"]*train\.py", line {waited}, in train'
