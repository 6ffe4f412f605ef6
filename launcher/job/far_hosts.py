"""What is known about the connected hosts, and what the end of a connection means. No clock."""

from __future__ import annotations

from hvdrun.errors import LaunchError
from hvdrun.job.events import HostEnded
from hvdrun.reports import lacking
from hvdrun.reports.failure_report import daemon_failed, error, host_lost, unreachable
from hvdrun.reports.quiet_hosts import QuietHosts

SSH_SAID_BYTES = 1 << 16


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


def failure_of(
    host: FarHost, event: HostEnded, has_started: bool, pause_s: float, python: str
) -> LaunchError | None:
    """Why the connection to a host has ended; None if that is no failure, or mpirun reports it.

    has_started: ranks of the host have. pause_s: for how long hvdrun did not run just before.
    """
    if event.nonsense:
        who = f"hvdrun's agent on {host.name}"
        return error("not understood", host=host.name, who=who, what=event.nonsense)
    if event.refused:
        return _refused(host.name, event.refused)
    if event.daemon_status is not None:
        # If ranks have started, or the daemon ended with 0, mpirun reports the rest.
        if event.daemon_status and not has_started:
            return daemon_failed(host.name, event.daemon_status, event.daemon_said)
        return None
    if not host.talks:
        return unreachable(host.name, host.ssh_said, python, event.daemon_said)
    how = "the connection to it was closed"
    if pause_s:
        how += f" while hvdrun itself did not run for {pause_s:.0f} s"
    return host_lost(host.name, how, host.ssh_said)


def _refused(host: str, why: str) -> LaunchError:
    kind, _, number = why.partition(" ")
    if kind == "lacks" and number.isdecimal():
        return lacking.of_host(host, int(number))
    return error("refused", host=host, said=why)
