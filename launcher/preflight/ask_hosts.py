"""Asks many hosts at once: a command each, which starts a host agent there. The agents then get
orders, and answer each of them; and the job can go on with the connections."""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvdrun.agent.frames import BYE, CHUNK, FACTS, GAVE_UP, ORDER, PING, BadFrame
from hvdrun.agent.host_connection import LEAVE_S, LINE_EVERY_S, HostConnection, connect, leave
from hvdrun.preflight.reply import Reply
from hvdrun.preflight.waiting import Waiting

DELAY_S = 3.0  # after which the user learns which hosts are late
AT_ONCE = 128  # hosts that have not answered yet
EXIT_S = 0.5  # between the end of a command's output and the command's end
# Start-up files of the remote shell may read our input. Those that read a line get an empty one;
# those that read to the end get the end, at half of the time limit.
# An answer this soon after the end of the input may have waited for it.
AT_THE_END_S = 1.5
MOST_FACTS = 1 << 20  # bytes of an answer


class _Call:
    """A connection, as Owner of what comes on it."""

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        selector: selectors.BaseSelector,
        has_input: bool = True,
    ) -> None:
        self.has_input = has_input
        self.begin = time.monotonic()
        self.begin_clock = time.time()
        self.reply: Reply | None = None
        self.answer: dict[str, Any] | None = None  # to the last order
        self.has_order = False  # it has not answered yet
        self.errors = b""
        self.ping_at = 0.0
        self.input_ended_at: float | None = None
        self.connection = connect(argv, environ, self, selector)

    @property
    def closed(self) -> bool:
        return self.connection.closed

    def on_hello(self) -> None:
        pass

    def on_data(self) -> None:
        pass

    def on_errors(self, data: bytes) -> None:
        self.errors = (self.errors + data)[-CHUNK:]

    def on_frame(self, kind: bytes, _: int, payload: bytes) -> None:
        if kind in (BYE, GAVE_UP):
            self.finish(EXIT_S)
        if kind not in (FACTS, ORDER):
            return
        if len(payload) > MOST_FACTS or (kind == ORDER and not self.has_order):
            raise BadFrame(f"an answer of {len(payload)} bytes that was not asked for")
        try:
            answer = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise BadFrame(str(error)) from error
        if not isinstance(answer, dict):
            raise BadFrame("an answer that is no object")
        if kind == ORDER:
            self.answer, self.has_order = answer, False
        elif self.reply is None:
            if not _has_time(answer):
                raise BadFrame("an answer without a time")
            self._answered(answer)

    def on_end(self) -> None:
        """What the command says last may come when its output has ended already. A connection in
        the background (ControlPersist) may keep its stderr open for ever."""
        self.finish(EXIT_S)

    def tick(self, now: float, limit_s: float) -> None:
        """Feeds start-up files that read, and ends a command that is late. A host agent learns that
        it is still wanted."""
        if self.closed:  # its end has just come
            return
        if self.reply is not None:
            if now >= self.ping_at:
                self.ping_at = now + LINE_EVERY_S
                self.connection.send(PING)
            return
        since_s = now - self.begin
        if since_s > limit_s:
            self.finish(0)
        elif self.input_ended_at is None:
            if since_s > limit_s / 2 or not self.has_input:
                self.input_ended_at = now
                self.connection.hang_up()
            elif not self.connection.talks:
                self.connection.prompt(now)

    def _answered(self, answer: dict[str, Any]) -> None:
        now = time.monotonic()
        at = float(answer["time_s"])
        skew_s = min(0.0, at - self.begin_clock) or max(0.0, at - time.time())
        ended_at = self.input_ended_at
        self.reply = Reply(
            answer,
            None,
            self.errors.decode(errors="replace"),
            now - self.begin,
            skew_s,
            came_at_the_end=ended_at is not None and now - ended_at < AT_THE_END_S,
        )
        if ended_at is not None:
            self.connection.kill()

    def finish(self, patience_s: float) -> None:
        """There is no answer, or no further one."""
        took_s, code = time.monotonic() - self.begin, None
        assert self.connection.process
        if self.reply is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.connection.process.wait(patience_s)
        self.connection.kill()
        if self.reply is None:
            errors, said = (
                text.decode(errors="replace") for text in (self.errors, self.connection.printed)
            )
            answer: dict[str, Any] | None = {} if self.connection.nonsense else None
            self.reply = Reply(answer, code, errors, took_s, stdout=said)


def _has_time(answer: Mapping[str, Any]) -> bool:
    at = answer.get("time_s")
    return isinstance(at, int | float) and 0 <= at < 1e12


class Conversation:
    """The commands by their keys. Those that have answered wait for orders. Close it: no command
    outlives it but those that `keep` has given away."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        environ: Mapping[str, str],
        have_input: bool = True,
    ) -> None:
        self.commands = commands
        self.environ = environ
        self.have_input = have_input
        self.selector = selectors.DefaultSelector()
        self.calls: dict[str, _Call] = {}  # those that run

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        leave([call.connection for call in self.calls.values()], LEAVE_S if kind is None else 0.0)
        self.calls.clear()
        self.selector.close()

    def keep(self, keys: Iterable[str]) -> dict[str, HostConnection]:
        """The connections to those of these hosts that have answered, for the job."""
        return {key: self.calls.pop(key).connection for key in keys if key in self.calls}

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
                if sum(call.reply is None for call in self.calls.values()) >= AT_ONCE:
                    break
                del due[key]
                argv = self.commands[key]
                self.calls[key] = _Call(argv, self.environ, self.selector, self.have_input)
            self._read()
            now = time.monotonic()
            for key, call in list(self.calls.items()):
                call.tick(now, limit_s)
                if key not in replies and (reply := call.reply) is not None:
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
                            late.connection.kill()
                    before = {}
            if len(replies) < len(self.commands) and now > tell_at:
                tell_at = float("inf")
                on_delay([k for k in self.calls if k not in replies and k not in before])
        return replies

    def order(self, orders: Mapping[str, object], limit_s: float) -> dict[str, dict[str, Any]]:
        """Gives each host its order. Returns the answers that come in time."""
        called = {key: call for key, call in self.calls.items() if key in orders}
        for key, call in called.items():
            call.answer, call.has_order = None, True
            call.connection.send(ORDER, json.dumps(orders[key]).encode())
        deadline = time.monotonic() + limit_s
        while any(call.answer is None and not call.closed for call in called.values()):
            if (now := time.monotonic()) > deadline:
                break
            self._read()
            for call in self.calls.values():
                call.tick(now, limit_s)
        for key, call in called.items():
            if call.answer is None:  # the job would get it late: it connects anew
                self.calls.pop(key).connection.kill()
        answers = {key: call.answer for key, call in called.items()}
        return {key: answer for key, answer in answers.items() if answer is not None}

    def _read(self) -> None:
        for event, _ in self.selector.select(0.1):
            event.data()


def reads_its_input(
    command: Sequence[str], environ: Mapping[str, str], reply: Reply, limit_s: float
) -> bool:
    """Whether a start-up file reads the input to its end: then the same command answers much
    sooner without any. Else the host is just slow."""
    if not reply.came_at_the_end:
        return False
    with Conversation({"": command}, environ, have_input=False) as hosts:
        again = hosts.answers(limit_s)[""]
    return again.answer is not None and again.took_s < reply.took_s / 2
