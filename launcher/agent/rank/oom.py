"""Whether the kernel killed a process for lack of memory, which looks like any other SIGKILL.

For the keepers, hence few imports. The kernel's log, if it can be read, names the process; else a
counter that has grown since the start decides.
"""

from __future__ import annotations

import contextlib
import os

# The files of a memory cgroup that count its kills, in version 2 and 1.
_COUNTERS = ("memory.events", "memory.oom_control")


def cgroup_folders(cgroups: str, mounts: str) -> list[str]:
    """The folders of the memory cgroup of a process, by its /proc/PID/cgroup and its mounts."""
    folders = []
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and "memory" not in controllers.split(","):
            continue
        kind = "cgroup2" if number == "0" else "cgroup"
        for mount in mounts.splitlines():
            _, place, of_kind, options, *_ = mount.split()
            if of_kind == kind and (number == "0" or "memory" in options.split(",")):
                # In a container, the mount's root is often the container's own cgroup.
                folders += [place + path, place]
    return folders


def _oom_kills_in(path: str) -> int | None:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            key, _, value = line.partition(b" ")
            if key == b"oom_kill":
                return int(value)
    return None


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory: in this cgroup if it counts
    them, else on this machine."""
    with contextlib.suppress(OSError):
        with open("/proc/self/cgroup") as file:
            cgroups = file.read()
        with open("/proc/self/mounts") as file:
            mounts = file.read()
        for folder in cgroup_folders(cgroups, mounts):
            for name in _COUNTERS:
                count = _oom_kills_in(os.path.join(folder, name))
                if count is not None:
                    return count
    return _oom_kills_in("/proc/vmstat") or 0


def log_names(pid: int) -> bool:
    """Whether the kernel's log can be read and says that it killed this process."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    killed = b"Killed process %d (" % pid
    try:
        while True:
            try:
                if killed in os.read(log, 1 << 13):
                    return True
            except BrokenPipeError:  # this message was overwritten: read the next one
                continue
    except OSError:
        return False
    finally:
        os.close(log)


def was_out_of_memory(pid: int, oom_kills_before: int) -> bool:
    """For a process that SIGKILL has just ended. In a container the log has other numbers."""
    return log_names(pid) or oom_kills() > oom_kills_before
