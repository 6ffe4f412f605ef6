"""Tells the user which hosts are silent for now, and which have come back. No clock.

Hosts that fall silent or come back together share a line: often a switch or this machine's own
network is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator

from hvdrun.reports.failure_report import names

# For so long a line waits for more hosts.
COLLECT_S = 1.0


class QuietHosts:
    def __init__(self) -> None:
        self.limit_s = 0.0  # after which a host is lost
        self.since: dict[str, float] = {}  # the silent hosts, and when each was last heard
        self.unsaid: list[str] = []  # those of them of which the user has not read
        self.back: dict[str, float] = {}  # of which the user has; and how long they were silent
        self.say_at: float | None = None

    def add(self, now: float, host: str, silent_s: float, limit_s: float) -> None:
        self.limit_s = limit_s
        self.since[host] = now - silent_s
        if host not in self.unsaid:
            self.unsaid.append(host)
        self._plan(now)

    def came_back(self, now: float, host: str, silent_s: float) -> None:
        if host not in self.unsaid:
            self.back[host] = silent_s
            self._plan(now)
        self.forget(host)

    def forget(self, host: str) -> None:
        """The connection to it has ended, or it is silent no more."""
        self.since.pop(host, None)
        if host in self.unsaid:
            self.unsaid.remove(host)

    def _plan(self, now: float) -> None:
        if self.say_at is None:
            self.say_at = now + COLLECT_S

    def lines(self, now: float) -> Iterator[str]:
        """What is due at `say_at`."""
        self.say_at = None
        quiet, back = sorted(self.unsaid), sorted(self.back)
        if quiet:
            silent_s = now - max(self.since[host] for host in quiet)
            one = len(quiet) == 1
            yield (
                f"hvdrun: {names(quiet)} {'has' if one else 'have'} given no sign of life for"
                f" {silent_s:.0f} s; the job ends if {'it stays' if one else 'one of them stays'}"
                f" silent for {self.limit_s:g} s (--host-timeout)"
            )
        if back:
            silent_s = max(self.back.values())
            upto = "" if len(back) == 1 else "up to "
            yield (
                f"hvdrun: {names(back)} {'is' if not upto else 'are'} back after"
                f" {upto}{silent_s:.0f} s without a sign of life"
            )
        self.unsaid, self.back = [], {}
