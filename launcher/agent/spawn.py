"""From an agent to the user's command: cores, signals and open files, then exec."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from typing import NoReturn

from hvdrun.agent import signals
from hvdrun.machine.environment import FILES
from hvdrun.machine.limits import set_open_files


def spawn(
    command: list[str],
    environment: dict[str, str],
    files: Mapping[int, int],
    cpus: frozenset[int] | None,
) -> tuple[int, int]:
    """Starts the command on these hardware threads, in a process group of its own: (pid, 0), or
    (0, errno). `files`: its descriptors → ours. It inherits all others, as some may be MPI's."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            for number, fd in files.items():
                os.dup2(fd, number)
            become(command, environment, cpus)
        except OSError as error:
            os.write(writer, b"%d" % (error.errno or errno.EIO))
        finally:
            os._exit(127)
    os.close(writer)
    with contextlib.suppress(OSError):  # the child does it too, in case it comes first
        os.setpgid(pid, pid)
    failure = os.read(reader, 16)
    os.close(reader)
    if failure:
        os.waitpid(pid, 0)
        return 0, int(failure)
    return pid, 0


def become(
    command: list[str], environment: dict[str, str], cpus: frozenset[int] | None
) -> NoReturn:
    """Raises OSError if there is no such program."""
    if cpus is not None:
        # For good. A cpuset that has changed meanwhile is no reason to fail.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
    signals.set_default()
    if FILES in environment:
        # The user's own limit of open files, which was raised for MPI. Last, as this process has
        # files with numbers above that limit, and can open no more then.
        os.get_exec_path(environment)  # imports what execvpe needs
        set_open_files(int(environment.pop(FILES)))
    os.execvpe(command[0], command, environment)
