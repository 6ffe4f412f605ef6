"""What is known about the other hosts: whether they are connected, and whether they give signs of
life. No clock: times of signs of life are those of `agent.silence.clock`."""

from __future__ import annotations

from hvdrun.agent.frames import PING_EVERY_S
from hvdrun.agent.silence import Silence
from hvdrun.errors import LaunchError
from hvdrun.reports import lacking
from hvdrun.reports.failure_report import error, host_lost, unreachable
from hvdrun.reports.quiet_hosts import QuietHosts

SSH_SAID_BYTES = 1 << 16
# After this long without a sign of life, the user learns that the host is silent.
QUIET_S = 6.0
# After hvdrun itself did not run, it only reads for this long, and judges nothing by its time.
CATCH_UP_S = 2.0


class FarHost:
    """A connected host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.talks = False
        self.ssh_said = b""

    def begin_to_talk(self) -> None:
        self.talks = True
        # What ssh said before, as about a key that it did not know, is not why it will end.
        self.ssh_said = b""

    def add_said(self, text: bytes) -> None:
        self.ssh_said = (self.ssh_said + text)[-SSH_SAID_BYTES:]

    def state(self) -> str:
        """What is known about the host while its ranks have not started."""
        if self.talks:
            return "ssh is connected, but MPI's daemon has not started them"
        said = self.ssh_said.decode(errors="replace").strip().splitlines()
        return "ssh has not connected" + (f" ({said[-1].strip()})" if said else "")

    def lost(self, python: str, printed: bytes, pause_s: float) -> LaunchError:
        """The connection to it has ended by itself. printed: by the login shell, if the host agent
        has not started; pause_s: for how long hvdrun did not run just before."""
        if not self.talks:
            return unreachable(self.name, self.ssh_said, python, printed)
        how = "the connection to it was closed"
        if pause_s:
            how += f" while hvdrun itself did not run for {pause_s:.0f} s"
        return host_lost(self.name, how, self.ssh_said)


def refused(host: str, why: str) -> LaunchError:
    """Its agent can't run ranks there."""
    kind, _, number = why.partition(" ")
    if kind == "lacks" and number.isdecimal():
        return lacking.of_host(host, int(number))
    return error("refused", host=host, said=why)


class FarHosts:
    def __init__(self) -> None:
        self.connected: list[FarHost] = []
        self.quiet = QuietHosts()
        self.gave_up: tuple[float, LaunchError] | None = None  # the first host that did, and when

    def named(self, name: str) -> FarHost:
        return next(host for host in self.connected if host.name == name)

    def remove(self, name: str) -> FarHost:
        host = self.named(name)
        self.connected.remove(host)
        self.quiet.forget(name)
        return host

    def give_up(self, at: float, error: LaunchError) -> None:
        if self.gave_up is None or at < self.gave_up[0]:
            self.gave_up = at, error


class SignsOfLife:
    """When hvdrun asks a host for one, and when the host is silent; it is lost after `limit_s`
    without one."""

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
