"""Signals: how a rank is ended with them, and which are passed on to it."""

from __future__ import annotations

import contextlib
import os
import signal

from hvdrun.machine.environment import ENDING

# A rank that has not ended after Ctrl-C and its grace gets TERM, and this long later KILL.
LAST_S = 2.0
# To hvdrun, these end the job.
ENDS_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# hvdrun passes these on to the ranks. ALRM: by default it ends a process without a word.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
SHELLS = (b"sh", b"bash", b"dash", b"zsh", b"ksh", b"mksh", b"busybox", b"csh", b"tcsh", b"fish")
# The supervisor decides what these do to a rank. Its shim, its keeper and the host agents live on:
# a batch system may send a signal to all processes of a job.
FOR_THE_JOB = (*ENDS_JOB, *PASSED_ON)


def heeded() -> list[int]:
    """The signals that are for the job. Under nohup, HUP (the terminal was closed) is not one of
    them."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [n for n in FOR_THE_JOB if not (nohup and n == signal.SIGHUP)]


def steps(first: int, grace_s: float) -> list[tuple[float, int]]:
    """The signals that end a rank, each with its time in seconds from now. `first`: INT or TERM."""
    if first == signal.SIGINT and grace_s:
        term_s, kill_s = grace_s, grace_s + LAST_S
        return [(0.0, signal.SIGINT), (term_s, signal.SIGTERM), (kill_s, signal.SIGKILL)]
    return [(0.0, signal.SIGTERM), (grace_s, signal.SIGKILL)]


def show_ending() -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(ENDING)


def length_s(first: int, grace_s: float) -> float:
    """From the first signal to KILL."""
    return steps(first, grace_s)[-1][0]


def pack(first: int, grace_s: float) -> bytes:
    """The payload of END."""
    return b"%d %d" % (first, round(1000 * grace_s))


def unpack(payload: bytes) -> tuple[int, float]:
    first, grace_ms = payload.split()
    return int(first), int(grace_ms) / 1000


def set_default() -> None:
    """Before exec: a program starts with each signal at its default, and none blocked. Python and
    MPIs ignore some, and what is ignored would stay so."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pass_on(pid: int, number: int) -> bytes:
    """Sends the signal to the process if that has a handler for it, or ignores it: b'sent'.
    Otherwise it would end the process: b'deadly'. b'absent': there is no such process, or it has
    ended."""
    try:
        status = _status(pid)
        if status[b"State"] in b"ZX":
            return b"absent"
        handled = int(status[b"SigIgn"], 16) | int(status[b"SigCgt"], 16)
        if handled >> (number - 1) & 1:
            os.kill(pid, number)
            return b"sent"
    except OSError:
        return b"absent"
    return b"deadly"


def is_caught(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, and is no shell: a shell that waits for a
    program runs its handler (trap) only when that has ended."""
    try:
        status = _status(pid)
    except OSError:
        return False
    caught = int(status[b"SigCgt"], 16) >> (number - 1) & 1
    return bool(caught) and status[b"Name"] not in SHELLS


def is_handled_in(group: int, number: int) -> bool:
    """Whether a process of the group that runs has a handler for the signal."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry)) == group:
                    status = _status(int(entry))
                    caught = int(status[b"SigCgt"], 16) >> (number - 1) & 1
                    if caught and status[b"State"] not in b"ZX":
                        return True
    return False


def _status(pid: int) -> dict[bytes, bytes]:
    """The first word of each line of the kernel's table about the process."""
    with open(f"/proc/{pid}/status", "rb") as file:
        lines = [line.partition(b":") for line in file]
    return {name: (words.split() or [b""])[0] for name, _, words in lines}
