"""Who asks a running hvdrun about its job: `hvdrun --stacks PID`, or `--metrics PID [--json]`, on
the same host.

For each question hvdrun listens on a socket whose name has its process number, so that anybody can
find it, and can take the name before it does. Hence both ends ask the kernel: hvdrun answers this
user and root, and who asks believes only that process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from functools import partial

from hvdrun.machine.socket_users import is_trusted, process_of, user_of

MOST = 16  # that wait at a time
ANSWER_S = 20.0
MOST_BYTES = 1 << 26  # of an answer; that of 10,000 ranks is a tenth of it
# The questions: where the ranks are, and how they have fared, in words or figures.
STACKS, METRICS, FIGURES = b"", b"-metrics", b"-figures"


class NoAnswer(Exception):
    """Why there is none."""


def address(pid: int, question: bytes = STACKS) -> bytes:
    return b"\0hvdrun-job-%d%s" % (pid, question)


class Askers:
    """`on_asked`: by question, what gets the number of each who asks it, to be answered by
    `answer`."""

    def __init__(
        self, selector: selectors.BaseSelector, on_asked: Mapping[bytes, Callable[[int], None]]
    ) -> None:
        self.selector = selector
        self.waiting: dict[int, socket.socket] = {}
        self.answered: set[socket.socket] = set()  # that have not taken all of the answer
        self.last = 0
        self.listeners: list[socket.socket] = []
        for question, tell in on_asked.items():
            listener = socket.socket(socket.AF_UNIX)
            self.listeners.append(listener)
            listener.setblocking(False)
            with contextlib.suppress(OSError):  # the name is taken, and so no question can come
                listener.bind(address(os.getpid(), question))
                listener.listen(MOST)
                heard = partial(self._accept, listener, tell)
                selector.register(listener, selectors.EVENT_READ, heard)

    def _accept(self, listener: socket.socket, tell: Callable[[int], None]) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            if len(self.waiting) + len(self.answered) >= MOST or not is_trusted(sock):
                sock.close()
                return
            sock.setblocking(False)
            self.last += 1
            self.waiting[self.last] = sock
            tell(self.last)

    def answer(self, number: int, text: str) -> None:
        sock = self.waiting.pop(number)
        self.answered.add(sock)
        rest = memoryview(text.encode(errors="replace"))

        def send() -> None:
            nonlocal rest
            try:
                rest = rest[sock.send(rest) :]
            except BlockingIOError:
                return
            except OSError:
                rest = rest[:0]
            if not rest:
                self._hang_up(sock)

        self.selector.register(sock, selectors.EVENT_WRITE, send)
        send()

    def _hang_up(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)
        self.answered.remove(sock)
        sock.close()

    def close(self) -> None:
        for sock in self.waiting.values():
            sock.close()
        self.waiting.clear()
        for sock in list(self.answered):
            self._hang_up(sock)
        for listener in self.listeners:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(listener)
            listener.close()
        self.listeners.clear()


def ask(pid: int, question: bytes = STACKS) -> str:
    """What that hvdrun answers. Raises NoAnswer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(address(pid, question))
        except OSError:
            raise NoAnswer(f"process {pid} is no hvdrun that runs a job on this host") from None
        # Root may ask anybody's: it has named the process, and only shows what that says.
        is_named = process_of(sock) == pid
        is_strange = not is_trusted(sock)
        if is_strange and not (is_named and os.geteuid() == 0):
            if is_named:
                raise NoAnswer(
                    f"process {pid} runs a job of user {user_of(sock)}: only that user and root may"
                    " ask it"
                )
            raise NoAnswer(f"a process of user {user_of(sock)} answers in place of process {pid}")
        if not is_named:
            raise NoAnswer(f"process {process_of(sock)} answers in place of process {pid}")
        answer = bytearray()
        try:
            while (data := sock.recv(1 << 16)) and len(answer) < MOST_BYTES:
                answer += data
        except TimeoutError:
            raise NoAnswer(f"process {pid} has not answered within {ANSWER_S:g} s") from None
        except OSError as error:
            raise NoAnswer(f"process {pid}: {error.strerror}") from error
    if not answer:
        raise NoAnswer(f"the job of process {pid} is ending, or has ended")
    text = answer.decode(errors="replace")
    if is_strange:
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text
