"""Removes what hvdrun says only on a slow or busy machine from its stderr."""

from __future__ import annotations

import re

WAITS = r"hvdrun: waiting for an answer from "  # preflight, after three seconds
# Open MPI's mpirun did not get a thread in time; hvdrun starts it again.
STARTS_AGAIN = r"hvdrun: \S+ could not start one of its own threads"


def without_delays(stderr: str) -> str:
    """The lines that are left of stderr. mpirun's own stay, unless it was started again."""
    is_second_start = re.search(STARTS_AGAIN, stderr)
    dropped = f"{WAITS}|{STARTS_AGAIN}" + (r"|\[mpirun\] " if is_second_start else "")
    return "".join(line for line in stderr.splitlines(True) if not re.match(dropped, line))
