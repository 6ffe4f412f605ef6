"""The output of ranks does not hold up the signs of life between hvdrun and its hosts."""

import contextlib
import os
import selectors
import socket
import time
from types import SimpleNamespace

import pytest

from hvdrun.agent import host_connection, peers
from hvdrun.agent.frames import (
    CHUNK,
    EXIT,
    HELLO,
    OUT,
    PING,
    RANK,
    frame,
    send,
    unpack,
)
from hvdrun.agent.host_connection import HostConnection
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.agent.silence import Silence, clock
from hvdrun.job import far_hosts
from hvdrun.job.course import Supervision
from hvdrun.job.events import HostBack, HostQuiet, HostSilent, SshSaid
from hvdrun.job.far_hosts import Pauses, SignsOfLife
from hvdrun.job.mpirun import LINE_BYTES, MpirunOutput
from hvdrun.output.folding import HEADER
from hvdrun.output.output import Output
from hvdrun.output.writer import Writer
from hvdrun.plan.request import Request
from hvdrun.reports.failure_report import names
from hvdrun.running.host_link import HostLink
from hvdrun.running.hosts import Hosts
from hvdrun.running.sources import Source
from hvdrun.running.supervise import Supervisor

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
        asked, self.role = socket.socketpair()
        name = f"server{number}"
        job.kept[name] = HostConnection(near, stderr, None, job.selector)
        job.hosts.connect(asked, [name.encode(), b"", b"sh", b"true", b"ssh"])
        self.unsent = bytearray(HELLO)
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
        # Before the host has spoken, hvdrun sends empty lines.
        self.heard = bytearray(self.heard.lstrip(b"\n"))
        return [kind for kind, *_ in unpack(self.heard)].count(PING)


@pytest.mark.parametrize("flood", FLOODS)
def test_a_host_hears_of_hvdrun_after_each_piece_of_what_all_hosts_write(flood, monkeypatch):
    """However many of them write at once, so that the time between two signs is that for one."""
    monkeypatch.setattr(far_hosts, "PING_EVERY_S", 0.0)
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
    command = SimpleNamespace(
        num_proc=HOSTS, shares=(), starter="mpirun", environment={}, sent=None
    )
    job = Supervisor(command, screen, Supervision(Request(())), None, True, None, {})
    stdin = SimpleNamespace(wanted_by=None, for_local_rank=None)
    job.hosts = Hosts(
        command, job.secret, 30.0, job.selector, stdin, job.kept, job._deliver, job._tell
    )
    job.mpirun_pipe = SimpleNamespace(pause=lambda paused: None)
    since = dict.fromkeys(range(HOSTS), 0)
    hosts += [FarHost(job, number) for number in range(HOSTS)]
    while len(unheard_bytes) < 10 * HOSTS:
        for host in hosts:
            host.say(FLOODS[flood])
        job._turn()
    assert job.course.error is None
    assert max(unheard_bytes) <= 2 * CHUNK
    job.hosts.close()
    for host in hosts:
        host.sock.close()
        host.role.close()
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

    def link(self, limit_s=30.0):
        """hvdrun's end of a connection, the host's end of it, and that of ssh's stderr. What the
        link tells is in `told`."""
        near, far = socket.socketpair()
        self.enter_context(far)
        reader, stderr = self.pipe()
        self.told = []
        calls = (lambda *_: None, self.told.append, lambda _: None, lambda _: None)
        asked, role = socket.socketpair()
        self.enter_context(role)
        connection = HostConnection(near, reader, None, self.selector)
        ends = (asked, (b"server9", b"", b"sh", b"true"), connection, {}, "secret", self.selector)
        link = HostLink(*ends, *calls, limit_s)
        self.callback(link.close)
        return link, far, stderr

    def turn(self):
        for key, _ in self.selector.select(0):
            key.data()


@pytest.fixture
def ends():
    with Ends() as ends:
        yield ends


class Host:
    """A host that has spoken once, at the time 0 of its link, and hvdrun's turns since then."""

    def __init__(self, ends, limit_s=30.0):
        self.ends = ends
        self.link, self.far, _ = ends.link(limit_s)
        self.far.send(HELLO)
        ends.turn()
        self.begin = self.link.signs.silence.looked
        ends.told.clear()

    def speaks(self):
        self.far.send(frame(PING, payload=b"0"))

    def turns(self, begin, end):
        """Two each second. The time at which the host is lost, or None."""
        lost = None
        for half in range(int(2 * begin), int(2 * end) + 1):
            if not self.link.tick(self.begin + half / 2):
                lost = lost or half / 2
        return lost

    def asked(self):
        """How often, since the last call."""
        return [kind for kind, *_ in unpack(bytearray(self.far.recv(CHUNK)))].count(PING)


@pytest.mark.parametrize("limit_s", [2.0, 6.0, 30.0])
def test_a_host_is_lost_after_the_limit(ends, limit_s):
    host = Host(ends, limit_s)
    assert host.turns(0, limit_s + 5) == limit_s
    assert host.link.how_it_fell_silent() == HostSilent("server9", limit_s + 5, limit_s)


def test_a_host_that_is_quiet_and_speaks_again_is_not_lost(ends):
    host = Host(ends)
    assert host.turns(0, 20) is None
    host.speaks()
    ends.turn()
    assert host.turns(20.5, 49.5) is None
    assert host.turns(50, 50) == 50
    assert ends.told == [
        HostQuiet("server9", 6.0, 30.0),
        HostBack("server9", 20.0),
        HostQuiet("server9", 6.0, 30.0),
    ]


def test_a_host_that_has_spoken_while_hvdrun_was_held_up_is_not_silent(ends):
    """Its words wait unread."""
    host = Host(ends)
    host.speaks()
    assert host.turns(0, 40) is None
    assert ends.told == []
    ends.turn()
    assert host.turns(40.5, 80) == 70


def test_a_host_whose_words_nobody_wants_to_read_is_not_silent(ends):
    host = Host(ends)
    host.link.pause(True)
    assert host.turns(0, 40) is None
    host.link.pause(False)
    assert host.turns(40.5, 80) == 70


@pytest.mark.parametrize("pause_s", [4, 40, 600])
def test_the_silence_of_a_host_counts_only_while_hvdrun_runs(ends, pause_s):
    """It is asked as soon as hvdrun runs again, and its time begins anew."""
    host = Host(ends)
    assert host.turns(0, 20) is None
    assert host.asked() == 20
    assert host.turns(20 + pause_s, 20 + pause_s) is None
    assert host.asked() == 1
    assert host.turns(20 + pause_s, 60 + pause_s) == 50 + pause_s


def test_a_host_is_asked_once_a_second():
    signs = SignsOfLife(0.0, 30.0)
    assert [at for at in range(0, 3000, 100) if signs.wants_asking(at / 1000)] == [1000, 2000]


@pytest.mark.parametrize(
    ("looks", "seconds", "pause_s"),
    [
        ([0.5, 1.0, 1.5], 1.5, 0.0),
        ([2.9, 3.0], 1.1, 0.0),  # a look that comes late counts a second
        ([1.0, 9.0], 0.0, 8.0),
        ([1.0, 9.0, 9.5], 0.5, 0.0),
    ],
)
def test_silence_is_counted_from_look_to_look(looks, seconds, pause_s):
    silence = Silence(0.0)
    assert [silence.look(at) for at in looks][-1] == pause_s
    assert silence.seconds == pytest.approx(seconds)


def test_after_a_pause_hvdrun_reads_before_it_judges():
    pauses = Pauses(0.0)
    assert [pauses.look(at) for at in (0.5, 10.5, 11.0)] == [0.0, 10.0, 0.0]
    assert [pauses.catch_up_s(at) for at in (11.0, 12.5, 13.0)] == [1.5, 0.0, 0.0]


def test_the_clock_goes_on_while_the_machine_is_suspended():
    assert clock() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=5.0)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c", "d"], "a, b, c and d"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 other hosts"),
    ],
)
def test_a_line_names_a_few_hosts(hosts, text):
    assert names(hosts) == text


def test_what_ssh_says_without_an_end_is_read_piece_by_piece(ends, monkeypatch):
    *_, stderr = ends.link()
    sizes = []

    def read(fd, size):
        sizes.append(len(data := os.read(fd, size)))
        if len(sizes) < 9:
            os.write(stderr, b"y" * CHUNK)
        return data

    monkeypatch.setattr(host_connection, "os", SimpleNamespace(**{**vars(os), "read": read}))
    os.write(stderr, b"y" * CHUNK)
    ends.turn()
    assert sizes == [CHUNK]
    assert ends.told == [SshSaid("server9", b"y" * CHUNK)]


def test_what_the_remote_shell_says_before_the_agent_is_not_kept(ends):
    link, far, _ = ends.link()
    for _ in range(3):
        far.send(b"welcome\n" * 1000)
        ends.turn()
        assert len(link.connection.buffer) <= len(HELLO)
    far.send(HELLO[:5])
    ends.turn()
    far.send(HELLO[5:])
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
        peers.listen(secret), ends.selector, deliver, lambda: os.open(os.devnull, os.O_RDONLY)
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
