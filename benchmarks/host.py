"""Describes the machine that figures were measured on, without naming it."""

import os
import platform
import re
import subprocess
from pathlib import Path


def describe() -> dict[str, str | int | float]:
    """The facts that a reader needs to judge the figures; text and numbers only."""
    import torch

    cpuinfo = Path("/proc/cpuinfo").read_text()
    meminfo = Path("/proc/meminfo").read_text()
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    memory_kb = re.search(r"^MemTotal:\s*(\d+)", meminfo, re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        **caches(),
        "memory_gib": round(int(memory_kb[1]) / 2**20) if memory_kb else 0,
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def caches() -> dict[str, str]:
    """The sizes of core 0's caches from level 2, such as {"L2": "1024K", "L3": "32768K"}."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level = (index / "level").read_text().strip()
        if level != "1":
            sizes[f"L{level}"] = (index / "size").read_text().strip()
    return sizes


def commit() -> str:
    """The commit of this checkout, with a + if files differ from it; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty=+"]
    try:
        run = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
        )
    except FileNotFoundError:
        return "unknown"
    return run.stdout.strip() or "unknown"
