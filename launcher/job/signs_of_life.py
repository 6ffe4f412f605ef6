"""When hvdrun asks a host for a sign of life, and when the host counts as lost. No clock."""

from __future__ import annotations

from hvdrun.agent.frames import PING_EVERY_S, SILENCE_LIMIT_S


class SignsOfLife:
    def __init__(self, now: float) -> None:
        self.heard = self.asked = now

    def wants_asking(self, now: float) -> bool:
        """True once every PING_EVERY_S."""
        if now - self.asked < PING_EVERY_S:
            return False
        self.asked = now
        return True

    def has_stopped(self, now: float) -> bool:
        return now - self.heard >= SILENCE_LIMIT_S
