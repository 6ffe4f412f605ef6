"""Counts the instructions of the hot path with callgrind: a figure that has no noise.

Two runs of counted.py differ in the number of operations only: the difference, divided by the
number of operations between them and by the ranks, is what one operation costs a rank. `core` is
what runs in the core's own code; `all` also what Python and the C library do for it. valgrind has
no AVX-512, so the core runs its AVX2 kernels.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import size_text

LIMIT_S = 300
# Ranks, how an operation is started, bytes.
CASES = ((1, "post", 4), (2, "post", 4), (2, "plan", 4), (2, "post", 64 << 10))


def lacking() -> str:
    """The reason why nothing can be counted here; empty if it can."""
    if shutil.which("valgrind"):
        return ""
    return "counting instructions needs valgrind: apt-get install valgrind"


def counted(core: Path, case: tuple[int, str, int], operations: int) -> dict[str, int]:
    """The instructions of one run."""
    program = str(Path(__file__).with_name("counted.py"))
    with tempfile.TemporaryDirectory(prefix="hvdlite-bench-") as folder:
        output = Path(folder, "callgrind.out")
        words = [str(word) for word in (*case, operations)]
        subprocess.run(
            [
                *("valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={output}"),
                *(sys.executable, "-S", program, str(core), *words),
            ],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=True,
            timeout=LIMIT_S,
        )
        return by_object(output.read_text().splitlines(), core.name)


def by_object(lines: Iterable[str], name: str) -> dict[str, int]:
    """From callgrind's output: the instructions of all objects, and of the one with this name.

    Costs stand in lines of a position and a number, below the `ob=` of the object whose code it is;
    the line after a `calls=` is what the called function took, which is counted there.
    """
    found = {"all": 0, "core": 0}
    names: dict[str, str] = {}
    current, skip = "", False
    for line in lines:
        if entry := re.match(r"(c?ob)=(\(\d+\))(?: (.+))?$", line):
            key, number, given = entry.groups()
            if given:
                names[number] = given
            if key == "ob":
                current = names[number]
        elif line.startswith("calls="):
            skip = True
        elif cost := re.match(r"[+\-*\d]\d* (\d+)$", line):
            if not skip:
                found["all"] += int(cost[1])
                if Path(current).name == name:
                    found["core"] += int(cost[1])
            skip = False
    return found


def per_operation(few: int, many: int, counts: Sequence[int], ranks: int) -> float:
    """What one operation costs one rank.

    >>> per_operation(1_000_500, 1_001_500, (500, 1500), 1)
    1.0
    """
    return (many - few) / (counts[1] - counts[0]) / ranks


def count(core: Path, counts: tuple[int, int]) -> list[dict[str, Any]]:
    """One row per case."""
    rows = []
    for case in CASES:
        ranks, kind, size_bytes = case
        title = f"{kind}, {size_text(size_bytes)}, {ranks} rank{'s'[: ranks > 1]}"
        print(f"  instructions of an operation: {title}", file=sys.stderr, flush=True)
        few, many = (counted(core, case, operations) for operations in counts)
        figures = {what: per_operation(few[what], many[what], counts, ranks) for what in few}
        rows.append({"operation": title, **figures})
    return rows
