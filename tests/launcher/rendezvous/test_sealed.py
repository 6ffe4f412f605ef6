"""Messages between two nodes over one TCP connection."""

import contextlib
import os
import socket

import pytest

from hvdrun.agent.frames import LONGEST
from hvdrun.rendezvous.relay import Relay
from hvdrun.rendezvous.sealed import CLOSED_EARLY, NOT_PROVED
from tests.launcher.rendezvous.loops import End, Loop, tcp_pair

KEY, OTHER_KEY = bytes(range(32)), bytes(32)


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def ends(loop):
    caller, listener = tcp_pair()
    return End(loop, caller, KEY, True), End(loop, listener, KEY, False)


def test_messages_of_any_size_come_whole_and_in_order(loop, ends):
    caller, listener = ends
    sent = [(b"A", b""), (b"B", b"x"), (b"C", os.urandom(65518)), (b"D", os.urandom(65519))]
    sent += [(b"E", os.urandom(3_000_000)), (b"F", b"end")]
    for end, other in ((caller, listener), (listener, caller)):
        for kind, payload in sent:
            end.connection.send(kind, payload)
        loop.until(lambda other=other: len(other.heard) == len(sent))
        assert other.heard == sent


def test_what_is_said_before_the_handshake_is_sent_after_it(loop, ends):
    caller, listener = ends
    caller.connection.send(b"A", b"early")
    listener.connection.send(b"B", b"earlier")
    loop.until(lambda: caller.heard and listener.heard)
    assert (listener.heard, caller.heard) == ([(b"A", b"early")], [(b"B", b"earlier")])


def test_nothing_readable_is_on_the_wire(loop):
    caller, wire = tcp_pair()
    other_wire, listener = tcp_pair()
    seen = []

    def pass_on(source, target):
        data = source.recv(65536)
        seen.append(data)
        target.sendall(data)

    for source, target in ((wire, other_wire), (other_wire, wire)):
        loop.selector.register(source, 1, lambda s=source, t=target: pass_on(s, t))
    one, two = End(loop, caller, KEY, True), End(loop, listener, KEY, False)
    one.connection.send(b"A", b"the value of a variable" * 100)
    loop.until(lambda: two.heard)
    assert b"variable" not in b"".join(seen)
    assert KEY not in b"".join(seen)


@pytest.mark.parametrize("changed", [50, 97, 100])
def test_a_byte_that_changes_on_the_way_ends_the_connection(loop, changed):
    caller, wire = tcp_pair()
    other_wire, listener = tcp_pair()
    passed = bytearray()

    def pass_on():
        data = bytearray(wire.recv(65536))
        at = changed - len(passed)
        if 0 <= at < len(data):
            data[at] ^= 1
        passed.extend(data)
        other_wire.sendall(data)

    loop.selector.register(wire, 1, pass_on)
    loop.selector.register(other_wire, 1, lambda: wire.sendall(other_wire.recv(65536)))
    one, two = End(loop, caller, KEY, True), End(loop, listener, KEY, False)
    one.connection.send(b"A", b"text" * 20)
    loop.until(lambda: two.ended is not None or len(passed) > 300)
    assert two.heard == []
    assert two.ended in (NOT_PROVED, None)


def test_ends_with_different_keys_hear_nothing_from_each_other(loop):
    caller, listener = tcp_pair()
    one, two = End(loop, caller, KEY, True), End(loop, listener, OTHER_KEY, False)
    one.connection.send(b"A", b"run this")
    two.connection.send(b"B", b"run that")
    loop.until(lambda: one.ended is not None and two.ended is not None)
    assert (one.heard, two.heard) == ([], [])
    assert (one.ended, two.ended) == (CLOSED_EARLY, NOT_PROVED)
    assert not one.connection.is_proved
    assert not two.connection.is_proved


def test_a_message_without_end_is_not_collected(loop, ends):
    caller, listener = ends
    caller.connection.send(b"A", bytes(LONGEST + 1))
    loop.until(lambda: listener.ended is not None)
    assert (listener.heard, listener.ended) == (
        [],
        f"it speaks another language (a message of {LONGEST + 1} bytes)",
    )


def test_an_orderly_end_is_told_from_a_failure(loop, ends):
    caller, listener = ends
    caller.connection.send(b"A", b"last words")
    caller.connection.drain(1.0)
    caller.connection.close()
    loop.until(lambda: listener.ended is not None)
    assert (listener.heard, listener.ended) in (
        ([], CLOSED_EARLY),  # the handshake had not been answered
        ([(b"A", b"last words")], ""),
    )


class Piped:
    """A relay between a connection and a pipe for each direction."""

    def __init__(self, loop, end):
        self.writes, source = socket.socketpair()
        sink, self.reads = socket.socketpair()
        self.relay = Relay(
            end.connection, loop.selector, {b"I": source.detach()}, {b"O": sink.detach()}
        )
        end.connection.on_message = lambda _, kind, payload: self.relay.give(kind, payload)
        self.writes.setblocking(False)
        self.reads.setblocking(False)


def test_a_relay_carries_megabytes_both_ways_and_then_their_end(loop, ends):
    near, far = (Piped(loop, end) for end in ends)
    far.relay.sources[b"O"] = far.relay.sources.pop(b"I")
    far.relay.sources[b"O"].on_data = lambda data: far.relay._send(b"O", data)
    far.relay.sinks[b"I"] = far.relay.sinks.pop(b"O")
    data = os.urandom(5_000_000)
    got = {near: bytearray(), far: bytearray()}
    sent = {near: 0, far: 0}
    ended = set()

    def turn():
        for side in (near, far):
            try:
                if sent[side] < len(data):
                    sent[side] += side.writes.send(data[sent[side] : sent[side] + 65536])
                    if sent[side] == len(data):
                        side.writes.close()
            except BlockingIOError:
                pass
            try:
                chunk = side.reads.recv(65536)
                got[side] += chunk
                if not chunk:
                    ended.add(side)
            except BlockingIOError:
                pass

    loop.until(lambda: len(ended) == 2, turn)
    assert got == {near: data, far: data}
    for side in (near, far):
        side.reads.close()


def test_a_reader_that_stops_stops_the_writer_and_fills_no_memory(loop, ends):
    near, far = (Piped(loop, end) for end in ends)
    far.relay.sinks[b"I"] = far.relay.sinks.pop(b"O")
    written = 0

    def write():
        nonlocal written
        with contextlib.suppress(BlockingIOError):
            written += near.writes.send(bytes(65536))

    before, same = -1, 0
    while same < 200:
        for key, _ in loop.selector.select(0):
            key.data()
        write()
        same = same + 1 if written == before else 0
        before = written
    # Buffers of the kernel on the way take some megabytes; ours are two of 256 KiB.
    assert written < 64 << 20
    assert len(near.relay.connection._unsent) < 1 << 20
    assert len(far.relay.sinks[b"I"].waiting) < 1 << 20
    for side in (near, far):
        side.writes.close()
        side.reads.close()
        side.relay.close()
