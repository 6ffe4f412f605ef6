"""What a process and those that it has started do at this moment, from /proc; and what one that
does not run waits for, from what the kernel tells: the system call that it is in with the file that
it is about, or else the function of the kernel in which it sleeps."""

from __future__ import annotations

import _thread  # to import threading a file is read, and its file server may be what hangs
import contextlib
import os
import time

from hvdrun.machine.limits import throttling

MOST_PROCESSES = 16
SHOWN = 120  # characters of a command


def look(
    pid: int, stack: tuple[list[list[object]], str] | None = None, stopped_s: float | None = None
) -> bytes:
    """The process and its descendants, in JSON: `at`, the seconds of a clock, and `processes`, rows
    of number, parent, state as in /proc/PID/stat, seconds of CPU used so far, command, whether an
    MPI is loaded, and what it waits for (see `kernel_wait`). The first row is `pid`'s; there is
    none if it has ended. `quotas`: of `pid`, see `throttling`. `stack`: what `agent.rank.notes` has
    read. `stopped_s`: for how long a signal has stopped `pid`, if the caller knows. If no file can
    be opened, the answer is empty: a keeper must not end because of that."""
    try:
        import json

        known, children = _table()
    except (OSError, ImportError):
        return b""
    found: list[list[object]] = []
    queue = [pid]
    while queue and len(found) < MOST_PROCESSES:
        number = queue.pop(0)
        if number in known:
            # Who reads the memory of a process that hangs in the kernel may hang, too.
            hangs = known[number][1] == "D"
            has_mpi = not hangs and _has_mpi(number)
            waits = kernel_wait(number, known[number][1])
            found.append([number, *known[number], _command(number, hangs), has_mpi, waits])
            queue += children.get(number, [])
    answer: dict[str, object] = {
        "at": time.monotonic(),
        "processes": found,
        "quotas": {folder: counts[:2] for folder, counts in throttling(pid).items()},
        "stopped_s": stopped_s,
    }
    if stack is not None:
        answer["frames"], answer["no_frames"] = stack
    return json.dumps(answer).encode()


def _table() -> tuple[dict[int, tuple[int, str, float]], dict[int, list[int]]]:
    """All processes: parent, state, CPU; and the children of each."""
    known: dict[int, tuple[int, str, float]] = {}
    children: dict[int, list[int]] = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                parent = int(fields[1])
                cpu_s = (int(fields[11]) + int(fields[12])) * tick_s
                known[int(entry)] = parent, fields[0].decode(), cpu_s
                children.setdefault(parent, []).append(int(entry))
    return known, children


def _command(pid: int, only_name: bool) -> str:
    for name in ("comm",) if only_name else ("cmdline", "comm"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            words = file.read(4 * SHOWN).decode(errors="replace").strip("\0\n").split("\0")
            text = " ".join(" ".join([os.path.basename(words[0]), *words[1:]]).split())
            if text:
                return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return "?"


def _has_mpi(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        return b"/libmpi" in file.read()
    return False


# -------------------------------------------------------------------- what it waits for

SHOWN_NAME = 160  # characters of a file's name
_LIMIT_S = 0.2

_SLEEPS = "sleeps"
_LOCK = "waits for a lock or another thread"
_CHILD = "waits for a child process to end"
_ANY = "waits for a file, a socket or a pipe"
_DISK = "waits for a disk"
_SERVER = "waits for a file server"
_DISK_OR_SERVER = "waits for a disk or a file server"
_FROZEN = "is frozen by its cgroup"
_MEMORY = "waits for memory"

_WAITING_LOCKS = (7, 38)  # F_SETLKW, F_OFD_SETLKW: all other commands of fcntl do not wait

# The name of each call; in words what who is in it waits for, or what it does with the file that is
# its first argument; and its number on x86-64 and on the machines whose numbers
# are those of asm-generic/unistd.h (-1: it has none there).
CALLS = (
    ("read", "read", 0, 63),
    ("pread64", "read", 17, 67),
    ("readv", "read", 19, 65),
    ("preadv", "read", 295, 69),
    ("write", "write", 1, 64),
    ("pwrite64", "write", 18, 68),
    ("writev", "write", 20, 66),
    ("pwritev", "write", 296, 70),
    ("sendfile", "write", 40, 71),
    ("copy_file_range", "read", 326, 285),
    ("fallocate", "write", 285, 47),
    ("ftruncate", "write", 77, 46),
    ("fsync", "sync", 74, 82),
    ("fdatasync", "sync", 75, 83),
    ("flock", "lock", 73, 32),
    ("fcntl", "fcntl", 72, 25),
    ("ioctl", "control", 16, 29),
    ("getdents64", "list", 217, 61),
    ("open", "open", 2, -1),
    ("openat", "open", 257, 56),
    ("stat", "open", 4, -1),
    ("lstat", "open", 6, -1),
    ("newfstatat", "open", 262, 79),
    ("statx", "open", 332, 291),
    ("recvfrom", "receive", 45, 207),
    ("recvmsg", "receive", 47, 212),
    ("sendto", "send", 44, 206),
    ("sendmsg", "send", 46, 211),
    ("accept", "accept", 43, 202),
    ("accept4", "accept", 288, 242),
    ("connect", "connect", 42, 203),
    ("futex", _LOCK, 202, 98),
    ("nanosleep", _SLEEPS, 35, 101),
    ("clock_nanosleep", _SLEEPS, 230, 115),
    ("wait4", _CHILD, 61, 260),
    ("waitid", _CHILD, 247, 95),
    ("poll", _ANY, 7, -1),
    ("ppoll", _ANY, 271, 73),
    ("select", _ANY, 23, -1),
    ("pselect6", _ANY, 270, 72),
    ("epoll_wait", _ANY, 232, -1),
    ("epoll_pwait", _ANY, 281, 22),
)
# By the beginning of the name of the kernel's function, which changes little between its versions.
_FUNCTIONS = (
    ("do_freezer_trap", _FROZEN),
    ("get_signal", _FROZEN),  # which has the former in it; who is stopped in it has state T
    ("__refrigerator", _FROZEN),
    ("mem_cgroup_", "waits for memory: its cgroup's limit is reached"),
    ("try_to_free_", _MEMORY),
    ("futex_", _LOCK),
    ("hrtimer_nanosleep", _SLEEPS),
    ("do_nanosleep", _SLEEPS),
    ("do_wait", _CHILD),
    ("pipe_read", "waits for data from a pipe"),
    ("anon_pipe_read", "waits for data from a pipe"),
    ("pipe_write", "waits for room in a pipe"),
    ("anon_pipe_write", "waits for room in a pipe"),
    ("n_tty_read", "waits for input from a terminal"),
    ("ep_poll", _ANY),
    ("poll_", _ANY),
    ("do_select", _ANY),
    ("locks_lock_inode_wait", "waits for a lock on a file"),
    ("flock_lock_inode_wait", "waits for a lock on a file"),
    ("unix_stream_", "waits for data from a socket"),
    ("sk_wait_data", "waits for data from a socket"),
    ("sk_stream_wait_memory", "waits for room in a socket"),
    ("inet_csk_", "waits for a connection"),
    ("rpc_", _SERVER),
    ("nfs", _SERVER),
    ("ceph", _SERVER),
    ("fuse_", _SERVER),
    ("request_wait_answer", _SERVER),  # fuse
    ("cifs", _SERVER),
    ("jbd2_", _DISK),
    ("balance_dirty_pages", _DISK),
    ("blk_", _DISK),
    ("io_schedule", _DISK_OR_SERVER),
    ("folio_wait", _DISK_OR_SERVER),
    ("wait_on_page", _DISK_OR_SERVER),
)
_SERVER_FILE_SYSTEMS = ("nfs", "cifs", "smb", "ceph", "fuse", "lustre", "gpfs", "beegfs", "9p")


def kernel_wait(pid: int, state: str) -> str:
    """In words, as "waits for a lock on the file /data/lock"; "" if the kernel does not tell.

    pid: a process; of its threads the main one is looked at. state: as in /proc/PID/stat.
    """
    if state not in "SD":
        return ""
    function = _read(pid, "wchan")
    by_function = next((words for name, words in _FUNCTIONS if function.startswith(name)), "")
    if "cgroup" in by_function:
        return by_function
    # While a process replaces its program, whoever reads its call waits until it has done so.
    call = _read_in_time(pid, "syscall") if state == "D" else _read(pid, "syscall")
    return _words(pid, call) or by_function


def _words(pid: int, call: str) -> str:
    """call: its number and arguments, as in /proc/PID/syscall; other text if it is in none."""
    try:
        number, first, second = (int(word, 0) for word in call.split()[:3])
    except ValueError:
        return ""
    column = {"x86_64": 2, "aarch64": 3, "riscv64": 3}.get(os.uname().machine)
    does = next((row[1] for row in CALLS if column and row[column] == number), "")
    if does == "fcntl":
        does = "lock" if second in _WAITING_LOCKS else ""
    if does == "open":
        return "waits until a file is opened or found"
    if " " in does or does in ("", _SLEEPS):
        return does
    try:
        return _about(does, os.readlink(f"/proc/{pid}/fd/{first}"))
    except OSError:
        return ""


def _about(does: str, file: str) -> str:
    """does: one of the words in CALLS."""
    kind, _, _ = file.partition(":")
    writes = does in ("write", "send")
    if kind in ("socket", "pipe"):
        asked = {
            "accept": "waits for somebody to connect to its socket",
            "connect": "waits until its socket is connected",
        }
        return asked.get(does, f"waits for {'room in' if writes else 'data from'} a {kind}")
    if file.startswith(("/dev/pts/", "/dev/tty")):
        return f"waits for {'input from ' if does == 'read' else ''}the terminal {file}"
    name = file if len(file) <= SHOWN_NAME else f"…{file[1 - SHOWN_NAME :]}"
    about = {
        "read": f"reads from {name}",
        "write": f"writes to {name}",
        "sync": f"waits until {name} is on its disk",
        "lock": f"waits for a lock on the file {name}",
        "control": f"waits for the driver of {name}",
        "list": f"lists the folder {name}",
    }
    return about[does] + _file_system(file) if does in about else ""


def _file_system(path: str) -> str:
    """The kind of a file server, as what hangs is then not this host. Its mount is found by name:
    who asked the file itself would hang, too."""
    best, kind, source = "", "", ""
    with contextlib.suppress(OSError), open("/proc/self/mounts", errors="replace") as mounts:
        for line in mounts:
            where, at, what = line.split(" ", 3)[:3]
            if (path == at or path.startswith(f"{at.rstrip('/')}/")) and len(at) >= len(best):
                best, kind, source = at, what, where
    return f" ({kind} of {source})" if kind.startswith(_SERVER_FILE_SYSTEMS) else ""


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}") as file:
        return file.read()
    return ""


def _read_in_time(pid: int, name: str) -> str:
    found: list[str] = []
    has_ended = _thread.allocate_lock()
    has_ended.acquire()

    def read() -> None:
        found.append(_read(pid, name))
        has_ended.release()

    try:
        _thread.start_new_thread(read, ())
    except RuntimeError:  # there may be no more threads
        return ""
    return found[0] if has_ended.acquire(timeout=_LIMIT_S) else ""
