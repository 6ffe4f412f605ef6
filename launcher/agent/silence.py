"""How long the other side of a connection has been silent. hvdrun and the host agents count only
time in which they ran themselves: one that was stopped or suspended has heard nothing either.

Imported by the agents, hence the standard library only, and little of it.
"""

from __future__ import annotations

import time

# After this long without a sign of life the other side counts as lost (--host-timeout).
HOST_TIMEOUT_S = 30.0
# A side that has not looked for this long did not run. Both loops look several times a second.
PAUSE_S = 3.0
# A look counts no more than this, as a side that looks late may also read late.
STEP_S = 1.0


def clock() -> float:
    """Seconds, those included in which the machine was suspended: time.monotonic() omits them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Silence:
    """`seconds`: since the last sign of life, or since this side runs again."""

    def __init__(self, now: float) -> None:
        self.looked = now
        self.seconds = 0.0

    def look(self, now: float) -> float:
        """Counts the time since the last look. If this side did not run meanwhile, begins anew and
        returns for how long that was; else 0."""
        passed, self.looked = now - self.looked, now
        if passed >= PAUSE_S:
            self.seconds = 0.0
            return passed
        self.seconds += min(passed, STEP_S)
        return 0.0

    def heard(self) -> None:
        self.seconds = 0.0
