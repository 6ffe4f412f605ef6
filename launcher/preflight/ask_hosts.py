"""Asks many hosts at once: a command each, which prints its answer between two marks."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdrun.agent.frames import CHUNK
from hvdrun.agent.probe import BEGIN, END
from hvdrun.machine.processes import die_with_parent

DELAY_S = 3.0  # after which the user learns which hosts are late
AT_ONCE = 128  # commands, each with two pipes
EXIT_S = 0.5  # between the end of a command's output and the command's end
KEPT_BYTES = 1 << 20  # so that start-up files that print without end do not fill the memory


@dataclass(frozen=True)
class Reply:
    """The result of one command."""

    answer: dict[str, Any] | None
    exit_code: int | None  # None: hvdrun ended it, at the time limit or after its answer
    stderr: str
    took_s: float
    clock_skew_s: float = 0.0  # how far the host's clock is outside of the call's begin and end


class _Call:
    def __init__(self, argv: Sequence[str], selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.begin = time.monotonic()
        self.begin_clock = time.time()
        self.reply: Reply | None = None
        self.out, self.err = b"", b""
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for hvdrun alone
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
        assert self.process.stdout
        assert self.process.stderr
        self.fds = {1: self.process.stdout.fileno(), 2: self.process.stderr.fileno()}
        for stream, fd in self.fds.items():
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, lambda s=stream: self._read(s))

    def _read(self, stream: int) -> None:
        if self.reply is not None:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fds[stream], CHUNK)
            if stream == 1:
                self.out = (self.out + data)[-KEPT_BYTES:]
                # A connection in the background (ControlPersist) may keep stderr open for ever.
                if not data or END in data or END in self.out[-2 * CHUNK :]:
                    self.finish(EXIT_S)
            elif data:
                self.err = (self.err + data)[-CHUNK:]
            else:
                self.selector.unregister(self.fds[2])

    def finish(self, patience_s: float) -> None:
        took_s, now = time.monotonic() - self.begin, time.time()
        answer = _between_marks(self.out)
        code: int | None = None
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(patience_s)
            with contextlib.suppress(BlockingIOError, ValueError):
                while data := os.read(self.fds[2], CHUNK):
                    self.err += data
        skew_s = 0.0
        if answer is not None:
            at = float(answer["time_s"])
            skew_s = min(0.0, at - self.begin_clock) or max(0.0, at - now)
        self.reply = Reply(answer, code, self.err.decode(errors="replace"), took_s, skew_s)
        self.close()

    def close(self) -> None:
        for fd in self.fds.values():
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(fd)
        if self.process.poll() is None:
            # With the processes that it has started, as ssh does for a ProxyJump.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdout
        assert self.process.stderr
        self.process.stdout.close()
        self.process.stderr.close()


def _between_marks(text: bytes) -> dict[str, Any] | None:
    before, end, _ = text.rpartition(END)
    _, begin, said = before.rpartition(BEGIN)
    if not begin or not end:
        return None
    try:
        answer = json.loads(said)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "time_s" in answer else None


def ask(
    commands: Mapping[str, Sequence[str]],
    limit_s: float,
    on_delay: Callable[[list[str]], None] = lambda _: None,
) -> dict[str, Reply]:
    """The replies to all commands, by their keys. Calls `on_delay` once with the keys of those that
    are late.

    Ends a command that has not answered within the limit. No command outlives this call.
    Raises OSError if a command can't be started.
    """
    selector = selectors.DefaultSelector()
    waiting = list(commands.items())
    running: dict[str, _Call] = {}
    replies: dict[str, Reply] = {}
    tell_at = time.monotonic() + DELAY_S
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                key, argv = waiting.pop(0)
                running[key] = _Call(argv, selector)
            for event, _ in selector.select(0.1):
                event.data()
            for key, call in list(running.items()):
                if call.reply is None and time.monotonic() - call.begin > limit_s:
                    call.finish(0)
                if call.reply is not None:
                    replies[key] = call.reply
                    del running[key]
            if running and time.monotonic() > tell_at:
                tell_at = float("inf")
                on_delay(list(running))
    finally:
        for call in running.values():
            call.close()
        selector.close()
    return replies
