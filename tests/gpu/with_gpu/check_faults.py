"""hvdrun names the rank that went wrong, in a job with GPU tensors, and nothing is left of it.

One process; it starts two ranks for each fault, all jobs at the same time.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.with_gpu import starting

# What hvdrun has to say.
FAULTS = {
    "killed": r"rank 1 on \S+ was ended by SIGKILL",
    "stopped": r"rank 1 on \S+ is stopped",
    "sleeping": r"rank 1 on \S+ sleeps",
    "raising": r"rank 1 on \S+ ended with exit code 1 ",
    "leaving": r"rank 1 on \S+ ended with exit code 7 ",
    "disagreeing": r"rank 1 on \S+ float32\[999\]",
}
# Of all jobs together. It ends before run.py would end it, which would leave its jobs behind.
LIMIT_S = float(os.environ.get("CHECK_LIMIT_S", "100"))
IMPATIENT = {
    "HVDLITE_STALL_CHECK_TIME_SECONDS": "4",
    "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "12",
}


def is_alive(pid: int) -> bool:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    # In a container nobody may fetch the exit code of what has ended.
    return after_name.split()[0] not in "ZX"


def on_the_gpu() -> set[int]:
    """The processes that a GPU works for, as far as the driver shows them."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError:  # no such program
        return set()
    return {int(line) for line in done.stdout.split() if line.isdigit()}


def problem_of(how: str, folder: Path, end: float) -> str:
    """Of a job with this fault; empty: all was right."""
    output = folder / how
    rank = str(Path(__file__).parent / "faulty_rank.py")
    command = [sys.executable, "-m", "hvdrun", "-np", "2", sys.executable, rank, how]
    variables = {**os.environ, **IMPATIENT}
    limit_s = max(0.0, end - time.monotonic())
    code, elapsed_s = starting.run(command, variables, limit_s, output)
    text = output.read_text(errors="replace")
    pids = {int(pid) for pid in re.findall(r"process (\d+)$", text, re.MULTILINE)}
    if code in (0, starting.TIMED_OUT):
        problem = f"exit code {code}"
    elif not re.search(FAULTS[how], text):
        problem = "rank 1 is not named"
    elif len(pids) != 2:
        problem = f"processes {pids}"
    elif left := {pid for pid in pids if is_alive(pid)} | (pids & on_the_gpu()):
        problem = f"left behind: {left}"
    else:
        return ""
    return f"{problem} after {elapsed_s:.0f} s\n{text}"


def main() -> int:
    wanted = sys.argv[1:] or list(FAULTS)
    failed = False
    end = time.monotonic() + LIMIT_S
    # The cores are those of a machine with a GPU; elsewhere one after the other.
    together = len(wanted) if (os.cpu_count() or 1) > 2 * len(wanted) else 1
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(together) as pool,
    ):
        problems = pool.map(lambda how: problem_of(how, Path(folder), end), wanted)
        for how, problem in zip(wanted, problems, strict=True):
            name = f"a_rank_that_is_{how}_is_named_by_hvdrun"
            print(f"FAIL {name}: {problem}" if problem else f"PASS {name}", flush=True)
            failed |= bool(problem)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
