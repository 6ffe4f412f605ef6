"""Hosts that are not ready yet: which of them are asked again, when, and what the user is told.

Where hosts start together (containers, machines of a cloud), their names may not resolve yet, and
their sshd may not run yet, when hvdrun begins. Pure: times are arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdrun.plan.hosts import few
from hvdrun.preflight.reply import Reply, trouble_of
from hvdrun.ssh_errors import CLOSED, NO_ROUTE, REFUSED, SLOW, TIMEOUT, UNKNOWN_NAME

# What may end by itself.
TEMPORARY = (UNKNOWN_NAME, REFUSED, CLOSED, TIMEOUT, NO_ROUTE, SLOW)
# Between two questions to a host: at first, and how it grows.
FIRST_PAUSE_S, GROWTH, LONGEST_PAUSE_S = 1.0, 1.5, 5.0
# After the first host that is not ready, the others have this long to be named in the same line.
SAY_AFTER_S = 1.0


class Waiting:
    """`begin`: when hvdrun began; `limit_s`: --start-timeout; `question_s`: the limit of each
    question; `is_unfit`: whether an answer shows something that waiting can't mend; `say` gets a
    line."""

    def __init__(
        self,
        begin: float,
        limit_s: float,
        question_s: float,
        is_unfit: Callable[[str, Reply], bool],
        say: Callable[[str], None],
    ) -> None:
        self.begin = begin
        self.limit_s = limit_s
        self.question_s = question_s
        self.is_unfit = is_unfit
        self.say = say
        self.pauses_s: dict[str, float] = {}  # of the hosts that were asked more than once
        self.unsaid: dict[str, str] = {}  # host → cause
        self.say_at = float("inf")
        self.has_said = False
        self.is_useless = False  # a host has a failure that waiting can't mend

    def again_at(self, now: float, host: str, reply: Reply) -> float | None:
        """When to ask the host again after this reply; None: it counts."""
        if reply.answer is not None:
            self.is_useless = self.is_useless or self.is_unfit(host, reply)
            self.unsaid.pop(host, None)
            return None
        found = trouble_of(reply)
        if found is None or found not in TEMPORARY:
            self.is_useless = True
            return None
        left_s = self.begin + self.limit_s - now
        if self.is_useless or left_s < FIRST_PAUSE_S:
            return None
        if host not in self.pauses_s:
            self.unsaid[host] = found.cause.format(limit_s=self.question_s)
            self.say_at = min(self.say_at, now + SAY_AFTER_S)
        before_s = self.pauses_s.get(host, FIRST_PAUSE_S / GROWTH)
        self.pauses_s[host] = min(GROWTH * before_s, LONGEST_PAUSE_S)
        return now + min(self.pauses_s[host], left_s / 2)

    def is_over(self, now: float) -> bool:
        """No host is asked again: the last reply of each counts."""
        return self.is_useless or now >= self.begin + self.limit_s

    def tell(self, now: float, all_have_replied: bool) -> None:
        """Names the hosts that are waited for, once each."""
        if not self.unsaid or self.is_over(now) or not (all_have_replied or now >= self.say_at):
            return
        by_cause: dict[str, list[str]] = {}
        for host, cause in self.unsaid.items():
            by_cause.setdefault(cause, []).append(host)
        parts = " and ".join(f"{few(hosts)} ({cause})" for cause, hosts in by_cause.items())
        self.say(f"waiting up to {self.limit_s:g} s (--start-timeout) for {parts}")
        self.unsaid.clear()
        self.say_at = float("inf")
        self.has_said = True

    def end(self, now: float, has_failed: bool) -> float | None:
        """Says that all are there. For how long hosts were waited for in vain, else None."""
        passed_s = now - self.begin
        if not has_failed and self.has_said:
            self.say(f"all hosts have answered, after {passed_s:.0f} s")
        return passed_s if has_failed and self.pauses_s and not self.is_useless else None
