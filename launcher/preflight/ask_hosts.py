"""Asks many hosts at once: a command each, which prints its answer between two marks. Commands
that stay then get orders, a line each, and answer each of them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hvdrun.agent.frames import CHUNK
from hvdrun.agent.probe import BEGIN, END
from hvdrun.machine.processes import die_with_parent
from hvdrun.preflight.reply import Reply
from hvdrun.preflight.waiting import Waiting

DELAY_S = 3.0  # after which the user learns which hosts are late
AT_ONCE = 128  # commands, each with three pipes
EXIT_S = 0.5  # between the end of a command's output and the command's end
KEPT_BYTES = 1 << 20  # so that start-up files that print without end do not fill the memory
# Start-up files of the remote shell may read our input. Those that read a line get an empty one;
# those that read to the end get the end, at half of the time limit.
LINE_EVERY_S = 1.0
# An answer this soon after the end of the input may have waited for it.
AT_THE_END_S = 1.5
LEAVE_S = 2.0  # for commands that stayed, to end by themselves


class _Call:
    def __init__(
        self,
        argv: Sequence[str],
        selector: selectors.BaseSelector,
        stays: bool = False,
        has_input: bool = True,
    ) -> None:
        self.selector = selector
        self.stays = stays
        self.has_input = has_input
        self.begin = time.monotonic()
        self.begin_clock = time.time()
        self.reply: Reply | None = None
        self.has_answered = False
        self.closed = False
        self.out, self.err = b"", b""
        self.line_at = self.begin
        self.input_ended_at: float | None = None
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for hvdrun alone
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        os.set_blocking(self.process.stdin.fileno(), False)
        self.fds = {1: self.process.stdout.fileno(), 2: self.process.stderr.fileno()}
        for stream, fd in self.fds.items():
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, lambda s=stream: self._read(s))

    def _read(self, stream: int) -> None:
        if self.closed:
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

    def tick(self, now: float, limit_s: float) -> None:
        """Feeds start-up files that read, and ends a command that is late."""
        if self.closed:  # its answer has just come
            return
        since_s = now - self.begin
        if since_s > limit_s:
            self.finish(0)
        elif self.input_ended_at is None:
            if since_s > limit_s / 2 or not self.has_input:
                self.input_ended_at = now
                self.end_input()
            elif now >= self.line_at:
                self.line_at = now + LINE_EVERY_S
                self.send(b"\n")

    def show_life(self, now: float) -> None:
        """To a command that stays, so that it knows that it is still wanted."""
        if not self.closed and now >= self.line_at:
            self.line_at = now + LINE_EVERY_S
            self.send(b"\n")

    def send(self, line: bytes) -> None:
        """Lost if the command no longer reads: its end shows soon."""
        assert self.process.stdin
        with contextlib.suppress(OSError, ValueError):
            os.write(self.process.stdin.fileno(), line)

    def end_input(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def finish(self, patience_s: float) -> None:
        took_s, now = time.monotonic() - self.begin, time.time()
        answer = _between_marks(self.out)
        if not self.has_answered and answer is not None and not _has_time(answer):
            answer = None
        code: int | None = None
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(patience_s)
            with contextlib.suppress(BlockingIOError, ValueError):
                while data := os.read(self.fds[2], CHUNK):
                    self.err = (self.err + data)[-CHUNK:]
        skew_s, at_the_end = 0.0, False
        if answer is not None and not self.has_answered:
            self.has_answered = True
            at = float(answer["time_s"])
            skew_s = min(0.0, at - self.begin_clock) or max(0.0, at - now)
            if self.input_ended_at is not None:
                at_the_end = time.monotonic() - self.input_ended_at < AT_THE_END_S
        said = self.out[-CHUNK:].decode(errors="replace") if answer is None else ""
        errors = self.err.decode(errors="replace")
        self.reply = Reply(answer, code, errors, took_s, skew_s, said, at_the_end)
        self.out = b""
        if answer is None or not self.stays or self.input_ended_at is not None:
            self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for fd in self.fds.values():
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(fd)
        if self.process.poll() is None:
            # With the processes that it has started, as ssh does for a ProxyJump.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.end_input()
        assert self.process.stdout
        assert self.process.stderr
        self.process.stdout.close()
        self.process.stderr.close()


def _has_time(answer: Mapping[str, Any]) -> bool:
    at = answer.get("time_s")
    return isinstance(at, int | float) and 0 <= at < 1e12


def _between_marks(text: bytes) -> dict[str, Any] | None:
    before, end, _ = text.rpartition(END)
    _, begin, said = before.rpartition(BEGIN)
    if not begin or not end:
        return None
    try:
        answer = json.loads(said)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


class Conversation:
    """The commands by their keys. Those in `staying` wait for orders after their answer. Close it:
    no command outlives it."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        staying: Collection[str] = (),
        have_input: bool = True,
    ) -> None:
        self.commands = commands
        self.staying = staying
        self.have_input = have_input
        self.selector = selectors.DefaultSelector()
        self.calls: dict[str, _Call] = {}  # those that run

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for call in self.calls.values():
            call.end_input()
        # Where srun stands in ssh's place, it ends its step only if it ends by itself.
        deadline = time.monotonic() + (LEAVE_S if kind is None else 0.0)
        for call in self.calls.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                call.process.wait(max(0.0, deadline - time.monotonic()))
            call.close()
        self.calls.clear()
        self.selector.close()

    def answers(
        self,
        limit_s: float,
        on_delay: Callable[[list[str]], None] = lambda _: None,
        waiting: Waiting | None = None,
    ) -> dict[str, Reply]:
        """The replies to all commands, by their keys: to each command's last attempt, if `waiting`
        asks some again. Returns when all have replied or `limit_s` after the begin of an attempt.
        After some seconds calls `on_delay` once with the keys of those that are late.

        Ends a command that has not answered within the limit. Raises OSError if a command can't be
        started.
        """
        due = dict.fromkeys(self.commands, 0.0)  # when to ask
        before: dict[str, Reply] = {}  # of those that are asked again
        replies: dict[str, Reply] = {}
        tell_at = time.monotonic() + DELAY_S
        while len(replies) < len(self.commands):
            now = time.monotonic()
            for key in [key for key, at in due.items() if at <= now]:
                if len(self.calls) >= AT_ONCE:
                    break
                del due[key]
                argv = self.commands[key]
                self.calls[key] = _Call(argv, self.selector, key in self.staying, self.have_input)
            self._read()
            now = time.monotonic()
            for key, call in list(self.calls.items()):
                if key in replies:
                    call.show_life(now)
                else:
                    call.tick(now, limit_s)
                    if (reply := call.reply) is not None:
                        again_at = waiting.again_at(now, key, reply) if waiting else None
                        if again_at is None:
                            replies[key] = reply
                            before.pop(key, None)
                        else:
                            due[key], before[key] = again_at, reply
                if call.closed:
                    del self.calls[key]
            if waiting is not None:
                waiting.tell(now, len(replies) + len(before) == len(self.commands))
                if waiting.is_over(now):
                    replies |= before
                    for key in before:
                        due.pop(key, None)
                        if (late := self.calls.pop(key, None)) is not None:
                            late.close()
                    before = {}
            if len(replies) < len(self.commands) and now > tell_at:
                tell_at = float("inf")
                on_delay([k for k in self.calls if k not in replies and k not in before])
        return replies

    def order(self, orders: Mapping[str, object], limit_s: float) -> dict[str, dict[str, Any]]:
        """Gives each command that stays its order. Returns the answers that come in time."""
        called = {key: call for key, call in self.calls.items() if key in orders}
        for key, call in called.items():
            call.reply = None
            call.send(json.dumps(orders[key]).encode() + b"\n")
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(c.reply is None for c in called.values()):
            self._read()
        replies = {key: call.reply for key, call in called.items() if call.reply is not None}
        return {key: reply.answer for key, reply in replies.items() if reply.answer is not None}

    def _read(self) -> None:
        for event, _ in self.selector.select(0.1):
            event.data()


def ask(
    commands: Mapping[str, Sequence[str]],
    limit_s: float,
    on_delay: Callable[[list[str]], None] = lambda _: None,
    have_input: bool = True,
) -> dict[str, Reply]:
    """The replies to all commands: see Conversation.answers. No command outlives this call."""
    with Conversation(commands, (), have_input) as hosts:
        return hosts.answers(limit_s, on_delay)


def reads_its_input(command: Sequence[str], reply: Reply, limit_s: float) -> bool:
    """Whether a start-up file reads the input to its end: then the same command answers much
    sooner without any. Else the host is just slow."""
    if not reply.came_at_the_end:
        return False
    again = ask({"": command}, limit_s, have_input=False)[""]
    return again.answer is not None and again.took_s < reply.took_s / 2
