"""Node 0's side: lets the other nodes in, and runs programs on them for whoever on this host asks
as the role `reach` (preflight, and what MPI starts in ssh's place).

It runs in a thread of hvdrun's, beside whatever hvdrun does; `FirstNode` is what the rest of hvdrun
sees. Programs on other nodes have a connection each, so that one whose output nobody reads holds up
no other.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable

from hvdrun.agent import frames
from hvdrun.agent.frames import BadFrame
from hvdrun.agent.frames import number as number_in
from hvdrun.agent.peers import Stranger
from hvdrun.agent.peers import listen as listen_here
from hvdrun.agent.signals import heeded
from hvdrun.errors import HostSetupError, StartTimeout, UsageError
from hvdrun.rendezvous import gate
from hvdrun.rendezvous.callers import Caller, Callers
from hvdrun.rendezvous.messages import (
    HELLO,
    RUN,
    SAY,
    STREAM,
    STREAM_S,
    WELCOME,
    Hello,
    Run,
    pack_run,
    unpack_hello,
)
from hvdrun.rendezvous.place import Place
from hvdrun.rendezvous.relay import Relay
from hvdrun.rendezvous.sealed import SealedSocket
from hvdrun.rendezvous.secret import hint

TURN_S = 0.25
# How long nodes get to take the result, and one that is refused to take the reason.
LAST_WORDS_S = 3.0
REFUSAL_S = 0.5
# Before the job starts, a node that has not even pinged for so long may have started anew.
SILENT_S = 5.0
FIRST_LINE_S, LINE_EVERY_S = 3.0, 15.0
_MOST_STRANGERS = 5  # that are remembered


class FirstNode:
    """Call `start`, then `wait_for_nodes`, and `end` whatever happens.

    only_this_user: nodes have no secret, and meet within this machine.
    on_signal(number, node): called in this object's thread when another node got a signal.
    secret_here: by which the role `reach` finds this process (see agent.peers); not the nodes' own.
    """

    def __init__(
        self,
        place: Place,
        key: bytes,
        own: Hello,
        only_this_user: bool,
        on_signal: Callable[[int, int], None],
    ) -> None:
        self.place = place
        self.key = key
        self.own = own
        self.only_this_user = only_this_user
        self.on_signal = on_signal
        self.secret_here = os.urandom(16).hex()
        self.welcome = b""
        self.selector = selectors.DefaultSelector()
        self.lock = threading.Condition()  # guards `hellos`, `orders` and `is_closed_to_more`
        self.hellos: dict[int, Hello] = {}
        self.refusal: str = ""  # of the first node that does not fit
        self.orders: list[Callable[[], None]] = []
        self.is_closed_to_more = False
        self.names: dict[str, int] = {}  # host → node; set before the first program runs
        # Of the thread alone:
        self.nodes: dict[int, SealedSocket] = {}
        self.heard_at: dict[int, float] = {}  # by node
        self.waiting: dict[str, tuple[Caller, float]] = {}  # number of a run → who wants it, until
        self.relays: dict[SealedSocket, tuple[Caller, Relay]] = {}
        self.strangers: set[str] = set()
        self.finished = False
        self.thread: threading.Thread | None = None
        self.has_ended = False  # the thread; guarded by the lock

    # ------------------------------------------------- for hvdrun's main thread

    def start(self, host_timeout_s: float) -> None:
        """Raises UsageError if the port can't be had."""
        self.welcome = b"%d" % (1000 * host_timeout_s)
        place = self.place
        try:
            if self.only_this_user:
                listeners = gate.listen_here(place.port)
            else:
                listeners = gate.listen(place.host, place.port)
        except (OSError, Stranger) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"node 0 can't listen at {place.meets_at} ({place.source}): {why}; free the port,"
                " or give all nodes another one"
            ) from error
        self.gate = gate.Gate(listeners, self.key, self.selector, self._admitted, self._stranger)
        listener = listen_here(self.secret_here)
        assert listener is not None, "nobody else knows the secret"
        self.callers = Callers(
            listener, self.selector, self._wanted, self._caller_left, self.secret_here
        )
        self.waker, self.wakes = os.pipe()
        os.set_blocking(self.waker, False)
        os.set_blocking(self.wakes, False)
        self.selector.register(self.waker, selectors.EVENT_READ, self._take_orders)
        thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of threads
            self._close()
            raise
        self.thread = thread

    def wait_for_nodes(self, limit_s: float, say: Callable[[str], None]) -> list[Hello]:
        """The greetings of all nodes but this one, in their order, once all have come.

        Raises StartTimeout after the limit, HostSetupError if a node does not fit to this one.
        """
        begin = time.monotonic()
        next_line = begin + FIRST_LINE_S
        wanted = range(1, self.place.nodes)
        with self.lock:
            while not self.refusal and len(self.hellos) < len(wanted):
                if self.has_ended:
                    raise RuntimeError("hvdrun's thread of the rendezvous has ended (see above)")
                now = time.monotonic()
                missing = [n for n in wanted if n not in self.hellos]
                if now > begin + limit_s:
                    raise StartTimeout(self._too_late(missing, limit_s))
                if now > next_line:
                    next_line = now + LINE_EVERY_S
                    say(f"hvdrun: waiting for {self._named(missing)} at {self.place.meets_at}")
                self.lock.wait(max(0.0, min(begin + limit_s, next_line) - now) + 0.01)
            self.is_closed_to_more = True
            if self.refusal:
                raise HostSetupError(self.refusal)
            return [self.hellos[n] for n in wanted]

    def say(self, text: str) -> None:
        """A line that every other node shows, too."""
        self._order(lambda: self._to_all(SAY, text.encode(errors="replace")))

    def end(self, exit_code: int) -> None:
        """Tells all nodes the result and closes everything."""
        if self.thread is None:
            return
        self._order(lambda: self._finish(exit_code))
        self.thread.join(2 * LAST_WORDS_S)

    def _order(self, order: Callable[[], None]) -> None:
        if self.thread is None:  # it could not start, and no node is here
            return
        with self.lock:
            self.orders.append(order)
        with contextlib.suppress(BlockingIOError):  # full of earlier wishes to wake up
            os.write(self.wakes, b"\0")

    def _named(self, nodes: list[int]) -> str:
        first = ", ".join(str(n) for n in nodes[:5]) + (", …" if len(nodes) > 5 else "")
        return f"node{'s' if len(nodes) > 1 else ''} {first} of {self.place.nodes}"

    def _too_late(self, missing: list[int], limit_s: float) -> str:
        place = self.place
        text = (
            f"{self._named(missing)} did not connect to {place.meets_at} within {limit_s:g} s;"
            " start the same command there, and check that this port can be reached from there"
            f"{hint(place.host, self.only_this_user)}; --start-timeout gives more time"
        )
        if self.strangers:
            named = ", ".join(sorted(self.strangers))
            text += f"; {named} connected and did not prove the secret: is it the same there?"
        return text

    # ------------------------------------------------------------- the thread

    def _serve(self) -> None:
        try:
            while not self.finished:
                self._turn()
        finally:  # after an error, too: nobody must wait for a thread that has ended
            self._close()
            with self.lock:
                self.has_ended = True
                self.lock.notify_all()

    def _close(self) -> None:
        for _, relay in self.relays.values():
            relay.close()
        for connection in self.nodes.values():
            connection.close()
        self.callers.close()
        self.gate.close()
        self.selector.close()

    def _turn(self) -> None:
        for key, _ in self.selector.select(TURN_S):
            key.data()
        self.gate.tick()
        self.callers.tick()
        now = time.monotonic()
        for number, (caller, until) in list(self.waiting.items()):
            if now > until:
                del self.waiting[number]
                caller.fail(f"hvdrun on {caller.host} has not answered within {STREAM_S:g} s")

    def _take_orders(self) -> None:
        os.read(self.waker, 4096)
        with self.lock:
            orders, self.orders = self.orders, []
        for order in orders:
            order()

    def _to_all(self, kind: bytes, payload: bytes) -> None:
        for connection in self.nodes.values():
            connection.send(kind, payload)

    def _finish(self, exit_code: int) -> None:
        self._to_all(frames.BYE, b"%d" % exit_code)
        until = time.monotonic() + LAST_WORDS_S
        for connection in list(self.nodes.values()):
            connection.drain(max(0.05, until - time.monotonic()))
            connection.close()
        self.finished = True

    # ------------------------------------------------------------- nodes

    def _stranger(self, address: str) -> None:
        if len(self.strangers) < _MOST_STRANGERS:
            self.strangers.add(address)

    def _admitted(self, connection: SealedSocket, kind: bytes, payload: bytes) -> None:
        if kind == STREAM:
            self._connect_stream(connection, payload.decode(errors="replace"))
            return
        try:
            if kind != HELLO:
                raise BadFrame("neither a greeting nor a program's connection")
            hello = unpack_hello(payload)
            problem = self._does_not_fit(hello)
        except BadFrame as error:
            problem = f"a node speaks another language ({error}): every node needs the same hvdlite"
            hello = None
        if problem or hello is None:
            connection.on_end = lambda *_: None
            connection.send(frames.REFUSED, problem.encode(errors="replace"))
            connection.drain(REFUSAL_S)
            connection.close()
            return
        number = hello.node_rank
        connection.on_message = lambda _, kind, payload: self._heard(number, kind, payload)
        connection.on_end = lambda *_: self._node_left(number)
        self.nodes[number] = connection
        self.heard_at[number] = time.monotonic()
        connection.send(WELCOME, self.welcome)
        with self.lock:
            self.hellos[number] = hello
            self.lock.notify_all()

    def _does_not_fit(self, hello: Hello) -> str:
        """Why a node can't take part. What a person must mend ends the job at once."""
        own, node = self.own, f"node {hello.node_rank} ({hello.hostname})"
        if self.is_closed_to_more:
            return "the job has started without this node: start it again on all nodes"
        self._forget_if_silent(hello.node_rank)
        if hello.node_rank in self.nodes:
            first = self.hellos[hello.node_rank].hostname
            return self._refuse(
                f"two hosts, {first} and {hello.hostname}, say that they are node"
                f" {hello.node_rank}: give each its own number"
            )
        for what, theirs, ours in (
            ("hvdlite", hello.version, own.version),
            ("--nodes", hello.nodes, own.nodes),
            ("-np", hello.num_proc, own.num_proc),
        ):
            if theirs != ours:
                return self._refuse(
                    f"{node} has {what} {_or_none(theirs)}, and node 0 ({own.hostname}) has"
                    f" {_or_none(ours)}: start the same command with the same installation on"
                    " every node"
                )
        if not 0 < hello.node_rank < own.nodes:
            return self._refuse(f"{node}: nodes are numbered from 0 to {own.nodes - 1}")
        return ""

    def _forget_if_silent(self, number: int) -> None:
        """A host that lost power does not close its connection, and comes again."""
        heard_at = self.heard_at.get(number, 0.0)
        if number in self.nodes and time.monotonic() - heard_at > SILENT_S:
            self.nodes[number].close()
            self._node_left(number)

    def _refuse(self, why: str) -> str:
        with self.lock:
            if not self.is_closed_to_more:
                self.refusal = self.refusal or why
            self.lock.notify_all()
        return why

    def _heard(self, number: int, kind: bytes, payload: bytes) -> None:
        self.heard_at[number] = time.monotonic()
        if kind == frames.PING and not self.nodes[number].is_full:  # else it reads no answers
            self.nodes[number].send(frames.PING)
        elif kind == frames.SIGNAL and number_in(payload) in heeded():
            self.on_signal(number_in(payload), number)

    def _node_left(self, number: int) -> None:
        del self.nodes[number]
        with self.lock:
            if not self.is_closed_to_more:
                self.hellos.pop(number, None)  # it may come again
        for run, (caller, _) in list(self.waiting.items()):
            if self.names.get(caller.host) == number:
                del self.waiting[run]
                caller.fail(f"hvdrun on {caller.host} has ended")

    # ------------------------------------------------------------- programs

    def _wanted(self, caller: Caller) -> None:
        """A process of this host wants a program on another node."""
        number = self.names.get(caller.host, -1)
        node = self.nodes.get(number)
        if node is None:
            known = "has ended" if number > 0 else "is not part of this job"
            caller.fail(f"hvdrun on {caller.host} {known}")
            return
        run = os.urandom(16).hex()
        self.waiting[run] = caller, time.monotonic() + STREAM_S
        node.send(RUN, pack_run(Run(run, caller.argv)))

    def _connect_stream(self, connection: SealedSocket, run: str) -> None:
        if run not in self.waiting:
            connection.close()
            return
        caller, _ = self.waiting.pop(run)
        connection.on_message = self._stream_message
        connection.on_end = self._stream_ended
        relay = Relay(connection, self.selector, *caller.descriptors())
        self.relays[connection] = caller, relay

    def _stream_message(self, connection: SealedSocket, kind: bytes, payload: bytes) -> None:
        caller, relay = self.relays[connection]
        if kind == frames.EXIT:
            code = number_in(payload)
            relay.finish(lambda: self._stream_done(connection, code))
        else:
            relay.give(kind, payload)
            if relay.sinks[frames.OUT].broken:  # nobody reads the program's output any more
                self._caller_left(caller)

    def _stream_done(self, connection: SealedSocket, code: int) -> None:
        if connection in self.relays:  # else the process has left meanwhile
            caller, relay = self.relays.pop(connection)
            relay.close()
            caller.end(code)

    def _stream_ended(self, connection: SealedSocket, why: str) -> None:
        caller, relay = self.relays[connection]
        if relay.on_written is not None:  # the program has ended, and so has the node's end
            return
        del self.relays[connection]
        caller.fail(f"the connection to hvdrun on {caller.host} has ended{why and f': {why}'}")
        relay.close()

    def _caller_left(self, caller: Caller) -> None:
        """As with ssh, the end of the local process ends the remote program's input."""
        for run, (waiting, _) in list(self.waiting.items()):
            if waiting is caller:
                del self.waiting[run]
        for connection, (other, relay) in list(self.relays.items()):
            if other is caller:
                del self.relays[connection]
                relay.close()
        caller.close()


def _or_none(value: object) -> str:
    return "none" if value is None else str(value)
