"""Finds and ends all descendants of this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable

from hvdrun.machine.environment import KEEPER


def set_subreaper() -> None:
    """Makes descendants whose parent ends children of this process, so that it can find them."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def hide_memory() -> None:
    """Other processes of this user can't read this one's memory any more, nor the environment that
    it has started with, and the kernel writes no core file of it. What it starts is as usual."""
    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0)


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        more = children.get(parents.pop(), [])
        parents += more
        found += more
    return found


def kill_descendants(limit_s: float = 2.0) -> None:
    """Kills all descendants, and waits until they are gone."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def kill_strays() -> None:
    """Kills the background processes that this host's ranks have left, once no keeper runs. An
    inherited variable identifies them; MPI's own processes do not have it."""
    mark = f"{KEEPER}=".encode()
    for pid in descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if any(word.startswith(mark) for word in file.read().split(b"\0")):
                os.kill(pid, signal.SIGKILL)


def die_with_parent(number: int) -> Callable[[], None]:
    """A function for a child to call before exec: it gets that signal when this process ends."""
    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig = 1

    def set_it() -> None:
        prctl(pr_set_pdeathsig, number, 0, 0, 0)

    return set_it


def remove_sessions(folders: Iterable[str]) -> None:
    """Removes Open MPI's session folders, which stay behind if its daemon was killed."""
    for folder in folders:
        if os.path.basename(folder).startswith(("ompi.", "prte.", "prted.")):
            with contextlib.suppress(OSError):
                if os.lstat(folder).st_uid == os.geteuid():
                    shutil.rmtree(folder, ignore_errors=True)


def session_of(folder: str, pid: int) -> str:
    """The session folder that Open MPI's mpirun or daemon with this number makes there."""
    return f"{folder}/ompi.{pid}"
