"""How long a job may take to end, and when mpirun gets a signal to end, too. No clock."""

from __future__ import annotations

import signal

from hvdrun.agent.signals import length_s

# This long after KILL, hvdrun itself kills what is left.
GIVE_UP_S = 2.0
# This long after KILL, mpirun gets a signal although ranks or hosts are still connected.
STUCK_S = 1.0
# How long mpirun may run after the last rank has ended; then TERM, and KILL after MPIRUN_GRACE_S.
MPIRUN_PATIENCE_S = 0.5
MPIRUN_GRACE_S = 1.0
# The signal is repeated: Open MPI ends at once only after a second one.
REPEAT_S = 0.1


# Without --grace-period: how long ranks have to end after a signal to hvdrun. After TERM batch
# systems and Kubernetes kill everything after 30 s; all must have ended by 25 s.
AT_THE_TERMINAL_S, OTHERWISE_S = 3.0, 20.0


def grace_s(number: int) -> float:
    """After this signal to hvdrun."""
    typed = number in (signal.SIGINT, signal.SIGQUIT)
    return AT_THE_TERMINAL_S if typed else OTHERWISE_S


class Ending:
    def __init__(self) -> None:
        self.kill_at: float | None = None  # when ranks get KILL; None: the job is not being ended
        self.help_at: float | None = None  # when mpirun gets TERM
        self.next_help_at = 0.0

    @property
    def has_begun(self) -> bool:
        return self.kill_at is not None

    def begin(self, now: float, grace_s: float, first: int = signal.SIGTERM) -> None:
        """Later calls can only shorten the grace."""
        at = now + length_s(first, grace_s)
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)

    @property
    def give_up_at(self) -> float:
        assert self.kill_at is not None
        return self.kill_at + GIVE_UP_S

    def look_at_mpirun(self, now: float, is_alone: bool) -> None:
        """`is_alone`: no keeper and no other host is connected."""
        if self.help_at is not None or self.kill_at is None:
            return
        if is_alone:
            self.help_at = self.next_help_at = now + MPIRUN_PATIENCE_S
        elif now >= self.kill_at + STUCK_S:
            self.help_at = self.next_help_at = now

    def mpirun_at(self) -> float:
        """When `look_at_mpirun` or `help_mpirun` is due."""
        assert self.kill_at is not None
        return self.kill_at + STUCK_S if self.help_at is None else self.next_help_at

    def help_mpirun(self, now: float) -> int | None:
        """The signal that mpirun gets now, or None."""
        if self.help_at is None or now < self.next_help_at:
            return None
        kill_at = self.help_at + MPIRUN_GRACE_S
        self.next_help_at = now + REPEAT_S
        if now >= kill_at:
            return signal.SIGKILL
        self.next_help_at = min(self.next_help_at, kill_at)
        return signal.SIGTERM
