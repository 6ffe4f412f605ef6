"""Who asks a running hvdrun about its job: `hvdrun --stacks PID` on the same host.

hvdrun listens on a socket whose name has its process number, so that anybody can find it, and can
take the name before it does. Hence both ends ask the kernel: hvdrun answers this user and root, and
who asks believes only that process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable

from hvdrun.machine.socket_users import is_trusted, process_of, user_of

MOST = 16  # that wait at a time
ANSWER_S = 20.0


class NoAnswer(Exception):
    """Why there is none."""


def address(pid: int) -> bytes:
    return b"\0hvdrun-job-%d" % pid


class Askers:
    """`on_asked` gets the number of each, to be answered by `answer`."""

    def __init__(self, selector: selectors.BaseSelector, on_asked: Callable[[int], None]) -> None:
        self.selector = selector
        self.on_asked = on_asked
        self.waiting: dict[int, socket.socket] = {}
        self.last = 0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.setblocking(False)
        with contextlib.suppress(OSError):  # the name is taken: nobody can ask
            self.listener.bind(address(os.getpid()))
            self.listener.listen(MOST)
            selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.listener.accept()
            if len(self.waiting) >= MOST or not is_trusted(sock):
                sock.close()
                return
            sock.setblocking(False)
            self.last += 1
            self.waiting[self.last] = sock
            self.on_asked(self.last)

    def answer(self, number: int, text: str) -> None:
        sock = self.waiting.pop(number)
        with sock, contextlib.suppress(OSError):
            sock.send(text.encode(errors="replace"))

    def close(self) -> None:
        for sock in self.waiting.values():
            sock.close()
        self.waiting.clear()
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.listener)
        self.listener.close()


def ask(pid: int) -> str:
    """What that hvdrun answers. Raises NoAnswer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(address(pid))
        except OSError:
            raise NoAnswer(f"process {pid} is no hvdrun that runs a job on this host") from None
        if not is_trusted(sock):
            raise NoAnswer(f"a process of user {user_of(sock)} answers in place of process {pid}")
        if process_of(sock) != pid:
            raise NoAnswer(f"process {process_of(sock)} answers in place of process {pid}")
        answer = bytearray()
        try:
            while data := sock.recv(1 << 16):
                answer += data
        except TimeoutError:
            raise NoAnswer(f"process {pid} has not answered within {ANSWER_S:g} s") from None
        except OSError as error:
            raise NoAnswer(f"process {pid}: {error.strerror}") from error
    if not answer:
        raise NoAnswer(f"the job of process {pid} is ending, or has ended")
    return answer.decode(errors="replace")
