"""Which algorithm reduces a slice between hosts, by its size and the number of hosts.

The table is built in, or read from a file that `python -m hvdlite.tune` has written. All ranks use
rank 0's table, which `init` sends to them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdlite import _core
from hvdlite.errors import ConfigError
from hvdlite.world.config import Config
from hvdrun.for_hvdlite import open_folder, replace

if TYPE_CHECKING:
    from hvdlite.world.bootstrap.peers import Peers

NUMBERS = {
    "recursive_doubling": _core.RECURSIVE_DOUBLING,
    "direct": _core.DIRECT,
    "ring": _core.RING,
}

MOST_RULES = 8  # HVDL_MAX_RULES of the core

# (largest slice in bytes, None: any size; algorithm), ascending.
Rules = tuple[tuple[int | None, str], ...]

KIB, MIB = 1024, 1024 * 1024

# Measured for 2 to 4 hosts; for more hosts from the model in docs/design/cost.md, with links of 10
# Gbit/s. An exception: many hosts use the ring for the largest slices. There its steps cost little,
# and it never makes all hosts send to one.
BUILT_IN: dict[int, Rules] = {
    2: ((512 * KIB, "recursive_doubling"), (None, "ring")),
    3: ((4 * MIB, "direct"), (None, "ring")),
    4: ((32 * KIB, "recursive_doubling"), (4 * MIB, "direct"), (None, "ring")),
    5: ((32 * KIB, "recursive_doubling"), (16 * MIB, "direct"), (None, "ring")),
    64: ((64 * KIB, "recursive_doubling"), (32 * MIB, "direct"), (None, "ring")),
    256: ((128 * KIB, "recursive_doubling"), (64 * MIB, "direct"), (None, "ring")),
}


class AlgorithmTable:
    """Rules by number of hosts."""

    def __init__(self, rules: Mapping[int, Rules]) -> None:
        self.rules = dict(rules)

    def rules_for(self, num_hosts: int) -> Rules:
        """The rules for the largest number of hosts in the table up to `num_hosts`, else those for
        its smallest."""
        known = [hosts for hosts in self.rules if hosts <= num_hosts]
        return self.rules[max(known) if known else min(self.rules)]

    def for_engine(self, num_hosts: int) -> tuple[tuple[int, int], ...]:
        """The rules as the argument `algorithms` of `_core.Engine`."""
        largest = (1 << 63) - 1
        return tuple(
            (largest if up_to is None else up_to, NUMBERS[name])
            for up_to, name in self.rules_for(num_hosts)
        )


def read(path: Path) -> AlgorithmTable:
    """Raises ValueError or OSError if the file does not exist or is not a table."""
    try:
        hosts = json.loads(path.read_text())["hosts"]
        table = {int(number): _checked(rules) for number, rules in hosts.items()}
    except (TypeError, KeyError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"not a table of algorithms: {error!r}") from error
    if not table or min(table) < 2:
        raise ValueError("a table of algorithms needs rules for 2 hosts or more")
    return AlgorithmTable(table)


def _checked(rules: Sequence[Sequence[Any]]) -> Rules:
    checked = tuple((up_to, name) for up_to, name in rules)
    sizes = [up_to for up_to, _ in checked]
    unknown = {name for _, name in checked} - set(NUMBERS)
    if unknown:
        raise ValueError(
            f"unknown algorithm {min(unknown)!r}; expected one of {', '.join(NUMBERS)}"
        )
    if len(checked) > MOST_RULES:
        raise ValueError(f"expected at most {MOST_RULES} rules, got {len(checked)}")
    for size in sizes[:-1]:
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise ValueError(f"{size!r} is not a size in bytes")
    if not sizes or sizes[-1] is not None or sizes[:-1] != sorted(set(sizes[:-1])):
        raise ValueError("the sizes must ascend, and the last one must be null")
    return checked


def contents_of(path: Path) -> dict[str, dict[str, object]]:
    """The contents of a file that `add` has written; no rules if it does not exist yet.

    Raises:
        ValueError: The file is not a table, or can't be written.
    """
    contents: dict[str, dict[str, object]] = {"hosts": {}}
    try:
        if path.exists():
            read(path)
            contents = json.loads(path.read_text())
        os.close(open_folder(str(path.parent)))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(str(error)) from error
    contents.setdefault("microseconds", {})
    return contents


def add(path: Path, num_hosts: int, rules: Rules, measured: object) -> None:
    """Writes the rules for `num_hosts` hosts to the file, with the measurements behind them, and
    keeps its other rules. Replaces the file in one step: readers see the old one or the new one."""
    contents = contents_of(path)
    contents["hosts"][str(num_hosts)] = rules
    contents["microseconds"][str(num_hosts)] = measured
    folder = open_folder(str(path.parent))
    try:
        replace(folder, path.name, (json.dumps(contents, indent=1) + "\n").encode(), 0o644)
    finally:
        os.close(folder)


def from_config(config: Config) -> AlgorithmTable:
    """The table that the knobs choose.

    Raises:
        ConfigError: The table can't be read.
    """
    if config.algorithm != "auto":
        return AlgorithmTable({2: ((None, config.algorithm),)})
    if not config.algorithm_table:
        return AlgorithmTable(BUILT_IN)
    try:
        return read(Path(config.algorithm_table))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"HVDLITE_ALGORITHM_TABLE={config.algorithm_table!r}: {error} "
            "(python -m hvdlite.tune writes one)"
        ) from error


def from_rank_0(config: Config, peers: Peers) -> AlgorithmTable:
    """Rank 0's table, on every rank. Collective.

    Raises:
        ConfigError: Rank 0 can't read it; on every rank.
    """
    table: AlgorithmTable | None = None
    problem: str | None = None
    if peers.rank == 0:
        try:
            table = from_config(config)
        except ConfigError as error:
            problem = str(error)
    table, problem = peers.bcast((table, problem))
    if table is None:
        raise ConfigError(problem)
    return table
