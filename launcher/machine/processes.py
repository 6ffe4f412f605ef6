"""Finding and ending everything that this process has started, however deep."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from hvdrun.machine.environment import KEEPER

# typing costs 10 ms of each start, and collections.abc as much.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def set_subreaper() -> None:
    """Descendants whose parent ends become children of this process, and so can be found."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


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
    """Ends everything below this process, and waits until it is gone."""
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
    """Ends what the ranks of this host have left in the background, when no keeper is there any
    more. It is known by a variable that it inherits; MPI's own processes do not have it."""
    mark = f"{KEEPER}=".encode()
    for pid in descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if any(word.startswith(mark) for word in file.read().split(b"\0")):
                os.kill(pid, signal.SIGKILL)


def die_with_parent(number: int) -> Callable[[], None]:
    """For a child to call before its exec: the signal that it gets when this process ends."""
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig = 1

    def set_it() -> None:
        prctl(pr_set_pdeathsig, number, 0, 0, 0)

    return set_it


def remove_sessions(folders: Iterable[str]) -> None:
    """Open MPI's session folders, which stay where its daemon had to be killed."""
    import shutil

    for folder in folders:
        if os.path.basename(folder).startswith(("ompi.", "prte.", "prted.")):
            shutil.rmtree(folder, ignore_errors=True)
