"""Who is let in where node 0 listens, and that strangers do no harm there."""

import contextlib
import os
import socket
import struct
import subprocess
import sys

import pytest

from hvdrun.rendezvous import gate as gates
from hvdrun.rendezvous.gate import MOST_PENDING, Gate, listen, listen_here
from tests.launcher.rendezvous.loops import End, Loop, free_port

KEY, OTHER_KEY = bytes(range(32)), bytes(32)


class Door:
    """A gate, on loopback or where it listens, and all that it has let in or turned away."""

    def __init__(self, listeners=None):
        self.loop = Loop()
        self.admitted, self.strangers, self.callers = [], [], []
        listeners = listeners or listen("127.0.0.1", 0)
        self.family, self.address = listeners[0].family, listeners[0].getsockname()
        self.gate = Gate(listeners, KEY, self.loop.selector, self._admit, self.strangers.append)

    def _admit(self, connection, kind, payload):
        connection.on_end = lambda *_: None
        self.admitted.append((kind, payload))

    def call(self):
        sock = socket.socket(self.family)
        sock.connect(self.address)
        self.callers.append(sock)
        return sock

    def call_as_node(self, key=KEY):
        end = End(self.loop, self.call(), key, is_caller=True)
        end.connection.send(b"H", b"hello")
        return end

    def close(self):
        self.gate.close()
        self.loop.close()
        for sock in self.callers:
            sock.close()

    def turn(self, times=20):
        for _ in range(times):
            for key, _ in self.loop.selector.select(0.01):
                key.data()
            self.gate.tick()


@pytest.fixture
def door():
    door = Door()
    yield door
    door.close()


def test_a_node_with_the_secret_is_let_in_with_its_first_message(door):
    door.call_as_node()
    door.loop.until(lambda: door.admitted)
    assert door.admitted == [(b"H", b"hello")]
    assert not door.gate.pending


def test_a_node_with_another_secret_is_turned_away_and_named(door):
    end = door.call_as_node(OTHER_KEY)
    door.loop.until(lambda: end.ended is not None)
    assert door.strangers == ["127.0.0.1"]
    assert door.admitted == []


GARBAGE = {
    "silence": b"",
    "a byte": b"x",
    "zeros": bytes(48),
    "a browser": b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n" + bytes(100),
    "noise": os.urandom(200_000),
    "the longest record": bytes(48) + struct.pack("!H", 65535) + bytes(65535),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_whoever_says_something_else_gets_no_answer_and_others_are_served(door, said):
    stranger = door.call()
    stranger.setblocking(False)
    with contextlib.suppress(OSError):
        stranger.send(said)
    door.call_as_node()
    door.loop.until(lambda: door.admitted)
    with contextlib.suppress(BlockingIOError, ConnectionResetError):  # it is still waited for
        assert stranger.recv(100) == b""
    assert door.admitted == [(b"H", b"hello")]


def test_a_recorded_greeting_sent_again_is_not_let_in(door):
    """Byte for byte what a node has sent, as one who reads the network can send it."""
    wire_here, wire_there = socket.create_server(("127.0.0.1", 0)), door.call()
    node = End(door.loop, socket.create_connection(wire_here.getsockname()), KEY, is_caller=True)
    node.connection.send(b"H", b"hello")
    here, _ = wire_here.accept()
    recorded = bytearray()

    def from_node():
        data = here.recv(65536)
        recorded.extend(data)
        wire_there.sendall(data)

    door.loop.selector.register(here, 1, from_node)
    door.loop.selector.register(wire_there, 1, lambda: here.sendall(wire_there.recv(65536)))
    door.loop.until(lambda: door.admitted)
    for sock in (here, wire_there):
        door.loop.selector.unregister(sock)
    thief = door.call()
    thief.sendall(recorded)
    door.loop.until(lambda: door.strangers)
    assert len(door.admitted) == 1
    for sock in (here, wire_here):
        sock.close()


def test_a_flood_of_silent_callers_takes_a_bounded_number_of_sockets(door):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3 * MOST_PENDING):
        door.call()
        door.turn(1)
    door.turn()
    assert len(door.gate.pending) <= MOST_PENDING
    assert len(os.listdir("/proc/self/fd")) - before <= 3 * MOST_PENDING + MOST_PENDING + 2
    door.call_as_node()
    door.loop.until(lambda: door.admitted)


def test_the_address_with_most_callers_loses_one_first(door):
    quiet = socket.create_connection(door.address, source_address=("127.0.0.2", 0))
    door.callers.append(quiet)
    door.turn(2)
    for _ in range(MOST_PENDING + 10):
        door.call()
        door.turn(1)
    assert [c.address for c in door.gate.pending.values()].count("127.0.0.2") == 1


def test_callers_that_take_too_long_are_hung_up_on(door, monkeypatch):
    slow = door.call()
    slow.sendall(b"x" * 47)
    door.turn(2)
    assert len(door.gate.pending) == 1
    monkeypatch.setattr(gates, "PENDING_S", 0.0)
    door.turn(2)
    assert not door.gate.pending
    assert slow.recv(1) == b""


def test_without_descriptors_the_gate_rests_and_then_goes_on(door, monkeypatch):
    real = door.gate.listeners[0]

    class Empty:
        def accept(self):
            raise OSError(24, "Too many open files")

    door.gate._accept(Empty())
    assert door.gate.rests_until is not None
    assert real not in [key.fileobj for key in door.loop.selector.get_map().values()]
    door.call_as_node()
    door.loop.until(lambda: door.admitted, door.gate.tick)


def test_without_a_secret_another_user_of_the_machine_is_turned_away_unheard():
    if os.geteuid():
        pytest.skip("only root can be another user")
    door = Door(listen_here(free_port()))
    program = (
        "import os, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        f"s = socket.socket(socket.AF_UNIX); s.connect({door.address!r});"
        "s.settimeout(5); print(s.recv(1))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as stranger:
        door.loop.until(lambda: stranger.poll() is not None)
        assert stranger.communicate()[0] == b"b''\n"
    assert not door.gate.pending
    door.call_as_node()
    door.loop.until(lambda: door.admitted)
    door.close()


def test_a_port_that_another_program_has_is_not_shared():
    with socket.create_server(("0.0.0.0", 0)) as other, pytest.raises(OSError, match="in use"):
        listen("server1", other.getsockname()[1])


def test_without_descriptors_all_listeners_rest_and_listen_again(door, monkeypatch):
    class Listener:
        """Is ready, and can't accept."""

        def __init__(self):
            self.ends = socket.socketpair()
            self.ends[1].send(b"x")

        def fileno(self):
            return self.ends[0].fileno()

        def setblocking(self, _):
            pass

        def accept(self):
            raise OSError(24, "Too many open files")

        def close(self):
            for end in self.ends:
                end.close()

    lacking = [Listener(), Listener()]
    door.gate.listeners += lacking
    for listener in lacking:
        door.loop.selector.register(
            listener,
            1,
            lambda listener=listener: door.gate._accept(listener),
        )
    for key, _ in door.loop.selector.select(0.1):
        key.data()
    assert door.gate.rests_until is not None
    for listener in lacking:
        door.gate.listeners.remove(listener)
        listener.close()
    door.call_as_node()
    door.loop.until(lambda: door.admitted, door.gate.tick)


def test_one_address_under_two_names_is_listened_on_once(monkeypatch):
    """The C library gives 127.0.0.1 twice where localhost stands for ::1, too."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))] * 2
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    found = [(*entry[:4], ("127.0.0.1", port)) for entry in found]
    monkeypatch.setattr(gates.socket, "getaddrinfo", lambda *_, **__: found)
    (listener,) = listen("localhost", port)
    listener.close()
