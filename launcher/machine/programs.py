"""Runs programs of this host for their output."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def output_of(argv: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None) -> str:
    """All that the program writes, whatever its exit code.

    Raises OSError if it can't be started, or runs longer than limit_s.
    """
    try:
        done = subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{argv[0]} did not end within {limit_s:g} s") from None
    return done.stdout.decode(errors="replace")
