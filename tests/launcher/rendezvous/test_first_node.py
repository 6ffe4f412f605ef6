"""Node 0 goes on serving the others whatever one of its peers does."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from hvdrun.agent import frames, peers
from hvdrun.agent.frames import EXIT, OUT, PING, REFUSED, SIGNAL
from hvdrun.errors import UsageError
from hvdrun.rendezvous.first_node import FirstNode
from hvdrun.rendezvous.messages import (
    HELLO,
    RUN,
    STREAM,
    WELCOME,
    Hello,
    pack_hello,
    unpack_run,
)
from hvdrun.rendezvous.place import Place
from hvdrun.rendezvous.sealed import FULL_BYTES
from tests.launcher.rendezvous.loops import LIMIT_S, End, Loop, free_port

KEY = bytes(range(32))


def greeting(number):
    return Hello("1", number, 2, f"host{number}", 2, 0, 1)


class Job:
    """Node 0 in this process, and a node that does what a test wants."""

    def __init__(self):
        self.port = free_port()
        place = Place("127.0.0.1", self.port, 0, 2, "a test")
        self.first = FirstNode(place, KEY, greeting(0), False, self.on_signal)
        self.signals = []  # each with its node
        self.first.start(host_timeout_s=30.0)
        self.first.names = {"host1": 1}
        self.loop = Loop()
        self.processes = []
        self.node = self.connect(HELLO, pack_hello(greeting(1)))
        self.loop.until(lambda: self.node.heard)
        assert self.node.heard.pop()[0] == WELCOME
        self.first.wait_for_nodes(LIMIT_S, print)

    def on_signal(self, number, node):
        self.signals.append((number, node))

    def connect(self, kind, payload):
        sock = socket.create_connection(("127.0.0.1", self.port))
        end = End(self.loop, sock, KEY, is_caller=True)
        end.connection.send(kind, payload)
        return end

    def ask(self, *argv, output=None, fds=3):
        """What the role `reach` does. The process's socket."""
        sock = peers.connect(self.first.secret_here)
        assert sock is not None
        null = os.open(os.devnull, os.O_RDWR)
        words = "\0".join((self.first.secret_here, "host1", *argv)).encode()
        given = [null, null if output is None else output, null][:fds]
        frames.send(sock, frames.frame(frames.HOST, payload=words), given)
        os.close(null)
        sock.settimeout(LIMIT_S)
        self.processes.append(sock)
        return sock

    def stream(self):
        """The node's connection for the program that was asked for last."""
        self.loop.until(lambda: [m for m in self.node.heard if m[0] == RUN])
        run = unpack_run(self.node.heard.pop()[1])
        end = self.connect(STREAM, run.number.encode())
        self.loop.until(lambda: end.connection.is_proved)
        return end

    def close(self):
        self.first.end(0)
        self.loop.close()
        for sock in self.processes:
            sock.close()


def answer_to(sock):
    """The exit code that a process of the role `reach` is told, and why."""
    ((kind, _, payload),) = frames.unpack(bytearray(sock.recv(4096)))
    assert kind == frames.BYE
    code, _, why = payload.partition(b" ")
    return int(code), why.decode()


@pytest.fixture
def job():
    job = Job()
    yield job
    job.close()


def runs_a_program(job):
    """Whether node 0 still connects a program's output and exit code."""
    reader, writer = os.pipe()
    process = job.ask("true", output=writer)
    os.close(writer)
    end = job.stream()
    end.connection.send(OUT, b"hello")
    end.connection.send(EXIT, b"3")
    job.loop.until(lambda: end.ended is not None)
    with open(reader, "rb") as file:
        return file.read() == b"hello" and answer_to(process) == (3, "")


@pytest.mark.parametrize("payload", [b"", b"no number", b"9" * 5000, "٣".encode()])
def test_an_exit_code_that_is_none_ends_that_program_only(job, payload):
    process = job.ask("true")
    job.stream().connection.send(EXIT, payload)
    code, why = answer_to(process)
    assert code == frames.SSH_FAILED
    assert "in place of a number)" in why
    assert runs_a_program(job)


def test_a_greeting_with_half_a_character_is_refused_and_others_are_served(job):
    bad = pack_hello(greeting(1)).replace(b'"host1"', b'"\\ud800"')
    end = job.connect(HELLO, bad)
    job.loop.until(lambda: end.heard)
    assert end.heard[0][0] == REFUSED
    assert b"wrong types in a greeting" in end.heard[0][1]
    job.node.connection.send(PING)
    job.loop.until(lambda: (PING, b"") in job.node.heard)


def test_a_host_name_with_half_a_character_is_no_part_of_the_job(job):
    sock = peers.connect(job.first.secret_here)
    job.processes.append(sock)
    null = os.open(os.devnull, os.O_RDWR)
    words = job.first.secret_here.encode() + b"\0\xed\xa0\x80\0true"
    frames.send(sock, frames.frame(frames.HOST, payload=words), [null] * 3)
    os.close(null)
    sock.settimeout(LIMIT_S)
    assert b"is not part of this job" in sock.recv(1000)


def test_pings_of_a_node_that_reads_no_answers_take_no_memory(job):
    answers = job.first.nodes[1]
    job.node.connection.pause(True)
    answers._unsent += bytes(2 * FULL_BYTES)  # as if the kernel took nothing more
    answers._flush = lambda: None
    for _ in range(100):
        job.node.connection.send(PING)
    job.node.connection.send(SIGNAL, b"%d" % signal.SIGUSR1)
    job.loop.until(lambda: job.signals)  # the pings have been read, too
    waiting = len(answers._unsent)
    answers._unsent.clear()
    job.node.connection.close()
    assert waiting == 2 * FULL_BYTES


def test_a_port_that_is_taken_is_the_error_and_saying_it_to_the_nodes_is_none(job):
    place = Place("127.0.0.1", job.port, 0, 2, "a test")
    first = FirstNode(place, KEY, greeting(0), False, job.on_signal)
    with pytest.raises(UsageError, match="node 0 can't listen at"):
        first.start(30.0)
    first.say("hvdrun: the port is taken")
    first.end(64)


def test_a_signal_of_another_node_comes_with_the_nodes_number(job):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1):
        job.node.connection.send(SIGNAL, b"%d" % number)
    job.loop.until(lambda: len(job.signals) > 1)
    assert job.signals == [(signal.SIGTERM, 1), (signal.SIGUSR1, 1)]


def test_a_process_that_leaves_as_its_program_ends_harms_no_other(job):
    """Both events in one turn of the loop, whichever comes first."""
    for _ in range(10):
        process = job.ask("true")
        end = job.stream()
        held, go_on = threading.Event(), threading.Event()

        def hold(held=held, go_on=go_on):
            held.set()
            go_on.wait(LIMIT_S)

        job.first._order(hold)
        assert held.wait(LIMIT_S)
        end.connection.send(EXIT, b"0")
        process.close()
        go_on.set()
        job.loop.until(lambda end=end: end.ended is not None)
    assert runs_a_program(job)


def test_a_process_whose_descriptors_did_not_arrive_is_told(job):
    code, why = answer_to(job.ask("true", fds=2))
    assert code == frames.SSH_FAILED
    assert "hvdrun has no descriptors left" in why
    assert runs_a_program(job)


def test_without_descriptors_processes_wait_until_there_are_some(job, monkeypatch):
    lacks = threading.Event()
    accept = job.first.callers.listener.accept

    class Listener:
        def accept(self):
            if not lacks.is_set():
                lacks.set()
                raise OSError(24, "Too many open files")
            return accept()

        def __getattr__(self, name):
            return getattr(listener, name)

    listener = job.first.callers.listener
    monkeypatch.setattr(job.first.callers, "listener", Listener())
    assert runs_a_program(job)
    assert lacks.is_set()


def test_without_a_thread_nothing_stays_open(monkeypatch):
    def lacks(_):
        raise RuntimeError("can't start new thread")

    port = free_port()
    place = Place("127.0.0.1", port, 0, 2, "a test")
    first = FirstNode(place, KEY, greeting(0), False, print)
    with monkeypatch.context() as limits:
        limits.setattr(threading.Thread, "start", lacks)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            first.start(host_timeout_s=30.0)
    first.end(76)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_an_error_in_the_thread_leaves_nobody_waiting(job, monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    process = job.ask("true")
    job.stream()

    def fails():
        raise ArithmeticError

    job.first._order(fails)
    with contextlib.suppress(ConnectionResetError):
        assert process.recv(4096) == b""
    job.loop.until(lambda: job.node.ended is not None)
    job.first.thread.join(LIMIT_S)
    assert errors[0].exc_type is ArithmeticError
    begin = time.monotonic()
    for _ in range(100_000):  # more than a pipe holds
        job.first._order(fails)
    assert time.monotonic() - begin < LIMIT_S
