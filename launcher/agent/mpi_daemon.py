"""Starts MPI's daemon on a remote host, by the command that MPI has written for a shell there."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys

from hvdrun.agent.frames import write_all
from hvdrun.machine.environment import PREFIX, is_in_step, without_step_variables

SHELLS = {"sh": ("/bin/sh",), "csh": ("/bin/csh", "/usr/bin/csh", "/bin/tcsh", "/usr/bin/tcsh")}


def start(command: str, shell: str) -> tuple[int, int]:
    """The daemon's pid, and a pipe with all that it prints. `shell`: for which the command is
    written, sh or csh."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            given = dict(os.environ)
            environment = without_step_variables(given) if is_in_step(given) else given
            environment[PREFIX] = prefix()
            command = safe_prefix(command, prefix())
            # Not the login shell of this host, for which MPI has not written the command.
            for path in SHELLS[shell]:
                with contextlib.suppress(OSError):
                    os.execve(path, [path, "-c", command], environment)
            missing = "no csh or tcsh" if shell == "csh" else "no /bin/sh"
            write_all(2, f"hvdrun: there is {missing} for MPI's daemon\n".encode())
        finally:
            os._exit(127)
    os.close(writer)
    return pid, reader


def prefix() -> str:
    """The folder of this installation, which may contain MPI's daemons. The same on every host."""
    return os.path.dirname(os.path.dirname(sys.executable))


def safe_prefix(command: str, folder: str) -> str:
    """MPI's command for the remote shell. MPIs do not quote their own path for a shell: where that
    matters, a variable replaces it, which the shell does not split at blanks."""
    if shlex.quote(folder) == folder:
        return command
    return f"IFS=; set -f; {command.replace(folder, '${' + PREFIX + '}')}"
