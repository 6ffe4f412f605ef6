"""Starts mpirun, and again if it failed by chance before any rank had started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvdrun.agent.frames import Waker
from hvdrun.agent.signals import heeded
from hvdrun.errors import LacksResource
from hvdrun.job.supervision import Supervision
from hvdrun.machine.own_files import open_file
from hvdrun.machine.processes import set_subreaper
from hvdrun.output.screen import Screen
from hvdrun.plan.command import Command
from hvdrun.running.node_signals import NodeSignals
from hvdrun.running.supervise import StartedBadly, Supervisor

if TYPE_CHECKING:
    from hvdrun.agent.host_connection import HostConnection

ATTEMPTS = 3


def supervise(
    command: Command,
    screen: Screen,
    supervision: Supervision,
    node_signals: NodeSignals | None = None,
    kept: dict[str, HostConnection] | None = None,
) -> int:
    """Runs the job and returns its exit code. kept: connections to hosts, for the first attempt.

    Raises LaunchError if hvdrun itself failed.
    """
    kept = kept or {}
    for host in kept.keys() - {share.host.name for share in command.shares}:
        kept.pop(host).kill()
    with _hosts_file(command):
        set_subreaper()
        if node_signals is not None:
            node_signals.begin()
        # All attempts share one waker, so that no signal between two of them is lost.
        # TSTP (Ctrl-Z) only makes a line: hosts would take a stopped launcher for dead.
        waker = Waker([signal.SIGCHLD, signal.SIGTSTP, *heeded()])
        attempt = 1
        while True:
            is_last = attempt == ATTEMPTS
            job = Supervisor(command, screen, supervision, waker, is_last, node_signals, kept)
            try:
                return job.run()
            except StartedBadly:
                attempt += 1
                screen.output.say(
                    f"hvdrun: {command.starter} could not start one of its own threads, before any"
                    f" rank had started; trying again ({attempt} of {ATTEMPTS})"
                )


@contextlib.contextmanager
def _hosts_file(command: Command) -> Iterator[None]:
    """The file with the list of hosts is there, if the command reads one."""
    if command.hosts_file is None:
        yield
        return
    path, content = command.hosts_file
    try:
        try:
            with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(content)
        except OSError as error:
            raise LacksResource(
                f"the list of hosts can't be written to {path}: {error.strerror}; make room there,"
                " or set TMPDIR to another folder"
            ) from error
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
