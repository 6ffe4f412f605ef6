"""Starts mpirun again where it failed by ill luck, before any rank was there."""

from __future__ import annotations

import signal

from hvdrun.agent.frames import Waker
from hvdrun.job.supervise import StartedBadly, Supervisor, heeded
from hvdrun.machine.processes import set_subreaper
from hvdrun.output.screen import Screen
from hvdrun.plan.command import Command

ATTEMPTS = 3


def supervise(
    command: Command, cwd: str, screen: Screen, start_timeout_s: float, verbose: bool
) -> int:
    """Runs the job: the exit code, or a LaunchError where hvdrun itself failed."""
    set_subreaper()
    # One for all attempts: a signal between two is not lost.
    waker = Waker([signal.SIGCHLD, signal.SIGTSTP, *heeded()])
    attempt = 1
    while True:
        is_last = attempt == ATTEMPTS
        job = Supervisor(command, cwd, screen, start_timeout_s, verbose, waker, is_last)
        try:
            return job.run()
        except StartedBadly:
            attempt += 1
            screen.output.say(
                f"hvdrun: {command.starter} could not start a thread of its own, before any rank"
                f" was there; once more ({attempt} of {ATTEMPTS})"
            )
