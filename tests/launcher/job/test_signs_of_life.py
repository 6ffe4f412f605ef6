"""The output of ranks does not hold up the signs of life between hvdrun and its hosts."""

import contextlib
import os
import selectors
import socket
import time
from types import SimpleNamespace

import pytest

from hvdrun.agent import peers
from hvdrun.agent.frames import (
    CHUNK,
    EXIT,
    MAGIC,
    OUT,
    PING,
    RANK,
    SILENCE_LIMIT_S,
    frame,
    send,
    unpack,
)
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.job import host_link, signs_of_life
from hvdrun.job.events import SshSaid
from hvdrun.job.mpirun_output import LINE_BYTES, MpirunOutput, Source
from hvdrun.job.signs_of_life import SignsOfLife
from hvdrun.job.supervise import Supervisor
from hvdrun.output.folding import HEADER
from hvdrun.output.output import Output
from hvdrun.output.writer import Writer

HOSTS = 5
FLOODS = {
    "one endless line": b"x" * CHUNK,
    "one endless line of carriage returns": b"\r" * CHUNK,
    "a bar and then an endless line": b"\r50%" + b"x" * (CHUNK - 5) + b"\n",
    "short lines": b"\n" * CHUNK,
    "tracebacks": (HEADER + b"\n") * (CHUNK // len(HEADER)),
}


class FarHost:
    """The agent of a host that always has something to send, and gets hvdrun's signs of life."""

    def __init__(self, job, number):
        self.rank = number
        near, self.sock = socket.socketpair()
        self.sock.setblocking(False)
        stderr, self.stderr = os.pipe()
        job._new_link(near, f"server{number}", stderr)
        self.unsent = bytearray(MAGIC)
        self.heard = bytearray()

    def say(self, text):
        """More of it, as far as there is room."""
        if not self.unsent:
            self.unsent += frame(OUT, self.rank, text)
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass

    def count_pings(self):
        try:
            while data := self.sock.recv(CHUNK):
                self.heard += data
        except BlockingIOError:
            pass
        return [kind for kind, *_ in unpack(self.heard)].count(PING)


@pytest.mark.parametrize("flood", FLOODS)
def test_a_host_hears_of_hvdrun_after_each_piece_of_what_all_hosts_write(flood, monkeypatch):
    """However many of them write at once, so that the time between two signs is that for one."""
    monkeypatch.setattr(signs_of_life, "PING_EVERY_S", 0.0)
    hosts: list[FarHost] = []
    unheard_bytes = []

    class Watched(Output):
        def feed(self, rank, fd, data):
            super().feed(rank, fd, data)
            for host in hosts:
                since[host.rank] = 0 if host.count_pings() else since[host.rank] + len(data)
            unheard_bytes.append(max(since.values()))

    output = Watched(HOSTS, lambda fd, data: None)
    writer = Writer()
    screen = SimpleNamespace(output=output, writer=writer)
    command = SimpleNamespace(num_proc=HOSTS, starter="mpirun")
    job = Supervisor(command, "/", screen, 60.0, False, None, is_last=True)
    job.local_ranks = SimpleNamespace(pause=lambda paused: None, keepers=())
    job.mpirun_pipe = SimpleNamespace(pause=lambda paused: None)
    job.stdin = SimpleNamespace(wanted_by=None)
    since = dict.fromkeys(range(HOSTS), 0)
    hosts += [FarHost(job, number) for number in range(HOSTS)]
    while len(unheard_bytes) < 10 * HOSTS:
        for host in hosts:
            host.say(FLOODS[flood])
        job._turn()
    assert job.course.error is None
    assert max(unheard_bytes) <= 2 * CHUNK
    for link in job.links:
        link.close()
    for host in hosts:
        host.sock.close()
        os.close(host.stderr)
    job.selector.close()
    os.close(writer.awake)


class Ends(contextlib.ExitStack):
    """A selector, and all that is to be closed."""

    def __init__(self):
        super().__init__()
        self.selector = self.enter_context(selectors.DefaultSelector())

    def pipe(self):
        reader, writer = os.pipe()
        self.callback(os.close, writer)
        return reader, writer

    def link(self):
        """hvdrun's end of a connection, the host's end of it, and that of ssh's stderr. What the
        link tells is in `told`."""
        near, far = socket.socketpair()
        self.enter_context(far)
        reader, stderr = self.pipe()
        self.told = []
        calls = (lambda *_: None, self.told.append, lambda _: None, lambda _: None)
        link = host_link.HostLink("server9", near, reader, "secret", self.selector, *calls)
        self.callback(link.close)
        return link, far, stderr

    def turn(self):
        for key, _ in self.selector.select(0):
            key.data()


@pytest.fixture
def ends():
    with Ends() as ends:
        yield ends


def test_a_host_that_has_spoken_while_hvdrun_was_held_up_is_not_silent(ends):
    link, far, _ = ends.link()
    far.send(MAGIC)
    ends.turn()
    late = time.monotonic() + SILENCE_LIMIT_S + 1
    assert not link.tick(late)
    far.send(frame(PING, payload=b"0"))
    assert link.tick(late)
    ends.turn()
    assert not link.tick(late)


@pytest.mark.parametrize(
    ("heard_at", "silent_at"),
    [((), 6.0), ((5.9,), 11.9), ((1.0, 2.0, 7.5), 13.5)],  # silent, and then back
)
def test_a_host_is_silent_six_seconds_after_its_last_sign(heard_at, silent_at):
    signs = SignsOfLife(0.0)
    for at in heard_at:
        assert not signs.has_stopped(at)
        signs.heard = at
    assert not signs.has_stopped(silent_at - 0.001)
    assert signs.has_stopped(silent_at)


def test_a_host_is_asked_once_a_second():
    signs = SignsOfLife(0.0)
    assert [at for at in range(0, 3000, 100) if signs.wants_asking(at / 1000)] == [1000, 2000]


def test_what_ssh_says_without_an_end_is_read_piece_by_piece(ends, monkeypatch):
    *_, stderr = ends.link()
    sizes = []

    def read(fd, size):
        sizes.append(len(data := os.read(fd, size)))
        if len(sizes) < 9:
            os.write(stderr, b"y" * CHUNK)
        return data

    monkeypatch.setattr(host_link, "os", SimpleNamespace(**{**vars(os), "read": read}))
    os.write(stderr, b"y" * CHUNK)
    ends.turn()
    assert sizes == [CHUNK]
    assert ends.told == [SshSaid("server9", b"y" * CHUNK)]


def test_what_the_remote_shell_says_before_the_agent_is_not_kept(ends):
    link, far, _ = ends.link()
    for _ in range(3):
        far.send(b"welcome\n" * 1000)
        ends.turn()
        assert len(link.buffer) <= len(MAGIC)
    far.send(MAGIC[:5])
    ends.turn()
    far.send(MAGIC[5:])
    ends.turn()
    assert link.talking


def test_the_end_of_a_rank_does_not_wait_for_what_it_left_in_the_background(ends):
    """That writes for ever."""
    delivered = []
    secret = os.urandom(16).hex()
    pipes = [ends.pipe(), ends.pipe()]

    def deliver(kind, rank, payload):
        delivered.append((kind, payload))
        if kind == OUT:
            os.write(pipes[0][1], b"more")

    local_ranks = LocalRanks(
        peers.listen(secret),
        ends.selector,
        deliver,
        lambda: os.open(os.devnull, os.O_RDONLY),
    )
    ends.callback(local_ranks.listener.close)
    keeper = ends.enter_context(socket.socket(socket.AF_UNIX))
    keeper.connect(peers.address(secret))
    send(keeper, frame(RANK, 0), [reader for reader, _ in pipes])
    ends.turn()
    ends.turn()
    os.write(pipes[0][1], b"last words")
    local_ranks.pause(True)
    send(keeper, frame(EXIT, 0, b"code 0 1"))
    ends.turn()
    assert delivered == [(RANK, b""), (OUT, b"last words"), (EXIT, b"code 0 1")]
    keeper.close()
    ends.turn()


def test_what_mpirun_says_waits_too_where_nobody_reads_what_hvdrun_writes(ends):
    heard, ended = [], []
    reader, writer = os.pipe()
    source = Source(reader, ends.selector, heard.append, lambda: ended.append(True))
    os.write(writer, b"one\n")
    source.pause(True)
    ends.turn()
    assert heard == []
    source.pause(False)
    ends.turn()
    assert heard == [b"one\n"]
    os.close(writer)
    ends.turn()
    assert (heard, ended) == ([b"one\n"], [True])


def test_a_line_of_mpirun_that_does_not_end_is_shown_in_pieces():
    output = MpirunOutput()
    for piece in (b"first\nab", b"c" * LINE_BYTES, b"d\n"):
        output.feed(piece, 0.0)
    assert output.everything() == ["first", "ab" + "c" * LINE_BYTES, "d"]
