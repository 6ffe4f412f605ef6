"""When hvdrun asks a host for a sign of life, when the host is silent, and when it counts as lost.
No clock: times are those of `agent.silence.clock`."""

from __future__ import annotations

from hvdrun.agent.frames import PING_EVERY_S
from hvdrun.agent.silence import Silence

# After this long without a sign of life, the user learns that the host is silent.
QUIET_S = 6.0
# After hvdrun itself did not run, it only reads for this long, and judges nothing by its time.
CATCH_UP_S = 2.0


class SignsOfLife:
    """Those of one host. It is lost after `limit_s` without one."""

    def __init__(self, now: float, limit_s: float) -> None:
        self.silence = Silence(now)
        self.limit_s = limit_s
        self.asked = now
        self.quiet_s = 0.0  # for how long a quiet host has been silent; 0: it is not quiet
        self.has_spoken = False  # since it became quiet

    def look(self, now: float) -> None:
        """Called in each turn of the loop."""
        if self.silence.look(now):
            self.asked = float("-inf")  # it is asked at once when hvdrun runs again
        if self.quiet_s:
            self.quiet_s = max(self.quiet_s, self.silence.seconds)

    def heard(self) -> None:
        self.silence.heard()
        self.has_spoken = True

    def wants_asking(self, now: float) -> bool:
        """True once every PING_EVERY_S."""
        if now - self.asked < PING_EVERY_S:
            return False
        self.asked = now
        return True

    def are_late(self) -> bool:
        return self.silence.seconds >= min(QUIET_S, self.limit_s)

    def have_stopped(self) -> bool:
        return self.silence.seconds >= self.limit_s

    def became_quiet(self) -> bool:
        """True once each time when the host has been silent for QUIET_S."""
        if self.quiet_s or self.silence.seconds < QUIET_S:
            return False
        self.quiet_s, self.has_spoken = self.silence.seconds, False
        return True

    def came_back(self) -> float:
        """Once when a quiet host has spoken again: for how long it was silent. Else 0."""
        silent_s = self.quiet_s if self.has_spoken else 0.0
        if silent_s:
            self.quiet_s = 0.0
        return silent_s


class Pauses:
    """The times in which hvdrun itself did not run: it was stopped, or its machine suspended."""

    def __init__(self, now: float) -> None:
        self.own = Silence(now)
        self.caught_up_at = now

    def look(self, now: float) -> float:
        """For how long hvdrun did not run until now; 0 if it did. Called in each turn."""
        pause_s = self.own.look(now)
        if pause_s:
            self.caught_up_at = now + CATCH_UP_S
        return pause_s

    def catch_up_s(self, now: float) -> float:
        """For how long hvdrun still only reads."""
        return max(0.0, self.caught_up_at - now)
