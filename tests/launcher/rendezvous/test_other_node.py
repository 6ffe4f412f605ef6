"""Whom a node believes that it is node 0."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from ipaddress import ip_address

import pytest

from hvdrun.agent import peers
from hvdrun.agent.frames import EXIT
from hvdrun.errors import StartTimeout, UsageError
from hvdrun.rendezvous import other_node
from hvdrun.rendezvous.first_node import FirstNode
from hvdrun.rendezvous.messages import RUN, STREAM, Hello, Run, pack_run
from hvdrun.rendezvous.other_node import OtherNode
from hvdrun.rendezvous.place import Place
from hvdrun.rendezvous.secret import key_of, name_here
from tests.launcher.rendezvous.loops import LIMIT_S, End, Loop, free_port

# Another user's node 0: knows by what name nodes meet, and the key, as everybody does, and wants a
# program. Says in the end what it has heard.
STRANGER = """
import os, selectors, socket, sys
from hvdrun.rendezvous.messages import RUN, WELCOME, Run, pack_run
from hvdrun.rendezvous.noise import Handshake
from hvdrun.rendezvous.sealed import SealedSocket
from hvdrun.rendezvous.secret import key_of
Handshake(key_of(""))  # loads what another user may not be able to read
listener = socket.socket(socket.AF_UNIX)
os.setgroups([]), os.setgid(65534), os.setuid(65534)
listener.bind(bytes.fromhex(sys.argv[1]))
listener.listen()
print("up", flush=True)
sock, _ = listener.accept()
heard, selector = [], selectors.DefaultSelector()
connection = SealedSocket(sock, key_of(""), selector, lambda *_: None, heard.append, False)
connection.on_end = lambda _, why: heard.append(why)
connection.send(WELCOME, b"30000")
connection.send(RUN, pack_run(Run("1", ("true",))))
while not heard:
    for key, _ in selector.select():
        key.data()
print(len(connection._buffer), connection.is_proved, connection._ciphers, flush=True)
listener.accept()
"""


def node_1(host="127.0.0.1", port=9, secret="", only_this_user=False):
    hello = Hello("1", 1, 2, "host1", 2, 0, 1)
    return OtherNode(Place(host, port, 1, 2, "a test"), key_of(secret), hello, only_this_user)


def node_0(port):
    hello = Hello("1", 0, 2, "host0", 2, 0, 1)
    return FirstNode(Place("localhost", port, 0, 2, "a test"), key_of(""), hello, True, print)


@pytest.mark.parametrize("host", ["a..b", f"{'x' * 70}.org", "."])
def test_a_name_that_can_be_none_is_told(host):
    with pytest.raises(StartTimeout, match=r"is no name: a part of it is empty, or longer than 63"):
        node_1(host).run(0.0, print)


def test_a_process_of_another_user_in_node_0s_place_hears_nothing_and_is_not_believed(monkeypatch):
    if os.geteuid():
        pytest.skip("only root can be another user")
    wanted = []
    monkeypatch.setattr(OtherNode, "_call_back", lambda _, run: wanted.append(run))
    node = node_1(port=free_port(), only_this_user=True)
    name = peers.address(name_here(node.place.port)).hex()
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, name], stdout=subprocess.PIPE
    ) as stranger:
        assert stranger.stdout.readline() == b"up\n"
        try:
            why = node._try(time.monotonic() + LIMIT_S)
            assert "a process of user 65534 holds the socket" in why
            assert stranger.stdout.readline() == b"0 False None\n"
            with pytest.raises(
                UsageError, match=r"can't listen at .* a process of user 65534 holds"
            ):
                node_0(node.place.port).start(30.0)
        finally:
            stranger.kill()
            node.selector.close()
    assert not node.is_welcome
    assert not wanted


def test_node_0_without_a_secret_has_its_port_alone_and_listens_on_no_network():
    first = node_0(free_port())
    first.start(30.0)
    try:
        with pytest.raises(UsageError, match="Address already in use; free the port"):
            node_0(first.place.port).start(30.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", first.place.port))
        node = node_1(port=first.place.port, only_this_user=True)
        assert node._try(time.monotonic() + LIMIT_S) == ""
        assert not first.strangers
        node.connection.close()
        node.selector.close()
    finally:
        first.end(0)


@pytest.fixture
def runs():
    """A node that belongs to a job, whose node 0 is the fixture's socket; nothing listens there."""
    with socket.socket() as node_0:
        node_0.bind(("127.0.0.1", 0))
        node = node_1(port=node_0.getsockname()[1])
        node.said = []
        node.say = node.said.append
        node.is_welcome = True
        node.way.found = socket.AF_INET, node_0.getsockname()
        loop = Loop()
        node.selector.close()
        node.selector = loop.selector
        yield node, node_0, loop
        loop.close()


def wants(node, *argv):
    node._heard(None, RUN, pack_run(Run("17", argv)))


def test_a_node_that_can_not_connect_for_a_program_tries_again(runs):
    node, node_0, loop = runs
    wants(node, "true")
    assert node.wanted
    node_0.listen()
    ends = []
    # The first connection ends at once, as when too many strangers call.
    node_0.setblocking(False)

    def accept():
        with contextlib.suppress(BlockingIOError):
            sock = node_0.accept()[0]
            if ends:
                ends.append(End(loop, sock, key_of(""), is_caller=False))
            else:
                ends.append(sock.close())
        node._turn()

    loop.until(lambda: len(ends) > 1 and (EXIT, b"0") in ends[1].heard, accept)
    assert ends[1].heard[0] == (STREAM, b"17")
    assert node.said == []


def test_a_connection_on_which_node_0_says_nothing_is_replaced_by_another_one(runs, monkeypatch):
    monkeypatch.setattr(other_node, "CONNECT_S", 0.1)
    node, node_0, loop = runs
    node_0.listen()
    node_0.setblocking(False)
    wants(node, "true")
    ends, stuck = [], []

    def accept():
        with contextlib.suppress(BlockingIOError):
            sock = node_0.accept()[0]
            if stuck:
                ends.append(End(loop, sock, key_of(""), is_caller=False))
            else:
                stuck.append(sock)
        node._turn()

    loop.until(lambda: ends and (EXIT, b"0") in ends[0].heard, accept)
    stuck[0].close()
    assert node.said == []


def test_a_node_that_can_not_connect_as_long_as_node_0_waits_says_why(runs, monkeypatch):
    node, _, loop = runs
    monkeypatch.setattr(other_node, "STREAM_S", 0.2)
    wants(node, "true")
    loop.until(lambda: node.said, node._turn)
    (said,) = node.said
    assert said == (
        f"hvdrun: node 1 could not connect to node 0 at {node.place.meets_at} once more, to run a"
        " program for it: Connection refused"
    )
    assert node.wanted == []


def link_local():
    """An address of this host that is valid on one network only, with the network."""
    with open("/proc/net/if_inet6") as addresses:
        for line in addresses:
            number, _, _, scope, _, interface = line.split()
            if scope == "20":
                return f"{ip_address(bytes.fromhex(number))}%{interface}"
    return None


def test_later_connections_to_a_link_local_address_are_on_the_same_network():
    address = link_local()
    if address is None:
        pytest.skip("no interface has a link-local address of IPv6")
    whole = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][-1]
    with socket.create_server(whole, family=socket.AF_INET6) as server:
        way = other_node.ToNode0(Place(address, server.getsockname()[1], 1, 2, "a test"), False)
        with way.connect() as first:
            way.settle(first)
            with way.connect() as second:
                assert second.getpeername() == first.getpeername()
