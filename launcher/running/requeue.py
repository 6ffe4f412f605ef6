"""Asks the batch scheduler to run a job again."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from hvdrun.job.preemption import after_requeue, not_asked
from hvdrun.plan.schedulers.scheduler import Requeue

LIMIT_S = 30.0


def requeue(asking: Requeue) -> str:
    """The line to show. Once the scheduler has agreed, it ends this job, hvdrun too."""
    code, words = _run(asking.look)
    if code == 0 and re.search(asking.ending, words):
        return not_asked(asking.ended)
    code, words = _run(asking.ask)
    return after_requeue(asking.ask, words if code else None)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Its exit code, -1 if it has none; and its words, in one line."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            start_new_session=True,  # a signal to hvdrun's group does not end it
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {LIMIT_S:g} s"
    except OSError as error:
        return -1, error.strerror or str(error)
    lines = map(str.strip, (done.stderr + done.stdout).splitlines())
    return done.returncode, "; ".join(filter(None, lines))
