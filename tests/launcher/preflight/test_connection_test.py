"""Probes on this machine that connect to each other, and strangers among them."""

import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

import hvdrun
from hvdrun.agent import connecting
from hvdrun.agent.connecting import CONNECTED, REFUSED, STRANGER
from hvdrun.preflight.ask_hosts import Conversation
from hvdrun.preflight.connections import Connection, run_test
from hvdrun.preflight.ports import Range

AGENT = str(Path(hvdrun.__file__).parent / "agent" / "agent.py")
PROBE = [sys.executable, "-I", "-S", AGENT, "host", "here"]
LIMIT_S = 60.0


@contextlib.contextmanager
def probes(*names):
    with Conversation(dict.fromkeys(names, PROBE), os.environ) as conversation:
        assert set(conversation.answers(LIMIT_S)) == set(names)
        yield conversation


def connection(source, target, ports=Range(), address="127.0.0.1"):  # noqa: B008
    return Connection(source, target, address, ports, "127.0.0.0/8")


def test_probes_that_know_the_secret_find_each_other():
    wanted = [connection(a, b) for a in "abc" for b in "abc" if a != b]
    wanted.append(connection("a", "b", Range(20000, 20999)))
    with probes(*"abc") as conversation:
        assert run_test(conversation, wanted) == dict.fromkeys(wanted, CONNECTED)


def test_a_port_in_use_is_passed_over_and_a_range_without_a_free_one_is_no_result():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = connection("a", "b", Range(port, port + 100))
        none = connection("b", "a", Range(port, port))
        with probes(*"ab") as conversation:
            assert run_test(conversation, [one, none]) == {one: CONNECTED}


def test_a_host_that_is_gone_has_no_result():
    wanted = [connection("a", "b"), connection("b", "a")]
    with probes("a") as conversation:
        assert run_test(conversation, wanted) == {}


@pytest.fixture
def asked():
    """asked(port): the result of a probe that connects to that port."""

    def ask(port):
        with probes("a") as conversation:
            order = {"secret": "00" * 32, "connect": [["127.0.0.1", port]]}
            return conversation.order({"a": order}, LIMIT_S)["a"]["results"]

    return ask


def test_a_port_where_no_program_listens_refuses(asked):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert asked(port) == [REFUSED]


@pytest.mark.parametrize("answer", [b"", b"x" * 32], ids=["hangs up", "guesses"])
def test_another_program_in_a_hosts_place_is_no_host(asked, answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock, _ = server.accept()
            with sock:
                sock.recv(48, socket.MSG_WAITALL)
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert asked(server.getsockname()[1]) == [STRANGER]
        thread.join()


def test_a_stranger_who_calls_gets_no_answer_and_is_not_in_the_way():
    secret = "11" * 32
    with probes("a", "b") as conversation:
        order = {"listen": [["127.0.0.1", 0, 0]]}
        (port,) = conversation.order({"a": order}, LIMIT_S)["a"]["listening"]
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        guess = socket.create_connection(("127.0.0.1", port))
        guess.sendall(bytes(48))
        orders = {
            "a": {"secret": secret, "connect": []},
            "b": {"secret": secret, "connect": [["127.0.0.1", port]]},
        }
        answers = conversation.order(orders, LIMIT_S)
        assert answers["b"] == {"results": [CONNECTED]}
        assert guess.recv(100) == b""
        for sock in (*silent, guess):
            sock.close()


def test_strangers_who_take_every_descriptor_are_not_in_the_way():
    secret = "11" * 32
    few = ["sh", "-c", 'ulimit -n 32; exec "$@"', "sh", *PROBE]
    with Conversation({"a": few, "b": PROBE}, os.environ) as conversation:
        assert set(conversation.answers(LIMIT_S)) == {"a", "b"}
        order = {"listen": [["127.0.0.1", 0, 0]]}
        (port,) = conversation.order({"a": order}, LIMIT_S)["a"]["listening"]
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        orders = {
            "a": {"secret": secret, "connect": []},
            "b": {"secret": secret, "connect": [["127.0.0.1", port]]},
        }
        assert conversation.order(orders, LIMIT_S)["b"] == {"results": [CONNECTED]}
        for sock in silent:
            sock.close()


def test_the_secret_is_in_no_command_line_and_in_no_environment(monkeypatch):
    secret = bytes(range(32))
    monkeypatch.setattr("hvdrun.preflight.connections.os.urandom", lambda _: secret)
    with probes(*"ab") as conversation:
        wanted = [connection("a", "b")]
        assert run_test(conversation, wanted) == {wanted[0]: CONNECTED}
        for call in conversation.calls.values():
            for name in ("cmdline", "environ"):
                said = Path(f"/proc/{call.connection.process.pid}/{name}").read_bytes()
                assert said
                assert secret.hex().encode() not in said


def test_a_proof_is_for_one_listener_and_one_end():
    secret, nonce = b"s" * 32, b"n" * 16
    one = connecting.proof(secret, b"caller", nonce, "10.0.0.1", 40000)
    assert one != connecting.proof(secret, b"caller", nonce, "10.0.0.2", 40000)
    assert one != connecting.proof(secret, b"listener", nonce, "10.0.0.1", 40000)
    assert len(one) == connecting.PROOF_BYTES


@pytest.mark.parametrize(
    "answers",
    [
        {"a": {"listening": "x"}},
        {"a": {"listening": [70000]}},
        {"a": {"listening": [[1]]}},
        {},
    ],
    ids=json.dumps,
)
def test_an_answer_that_is_none_is_no_result(answers):
    class Odd:
        def order(self, orders, limit_s):
            return answers

    assert run_test(Odd(), [connection("b", "a")]) == {}
