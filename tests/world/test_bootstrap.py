"""Ranks without MPI meet: over a Store that is not trusted, on a socket that anybody can see.

The ranks are threads of this process: what they do there needs no process of their own.
"""

import contextlib
import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from hvdlite.errors import LaunchError
from hvdlite.world.bootstrap import host_peers, on_host, through_store
from hvdlite.world.bootstrap.through_store import Place
from hvdlite.world.teams.placement import own_host_name
from tests.harness.needs import lacking

LIMIT_S = 60.0
NOBODY = 65534
CLONE_NEWNET = 0x40000000


def in_threads(*calls):
    """The results of calls that need each other, or what they raised."""
    results = [None] * len(calls)

    def run(number):
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "ranks still wait"
    return results


def meets(store, rank, size, timeout_s=LIMIT_S, purpose="world"):
    return lambda: through_store.meet(Place(store, rank, size, timeout_s, purpose), 0.0)


@contextlib.contextmanager
def star(size, timeout_s=LIMIT_S):
    store = dist.HashStore()
    peers = in_threads(*(meets(store, rank, size, timeout_s) for rank in range(size)))
    try:
        yield peers
    finally:
        for one in peers:
            one.free()


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def another_user(code, *arguments):
    """A program of another user, once it has printed a line."""
    if os.geteuid():
        lacking("only root can start a process of another user")
    program = f"import os, sys, socket; os.setuid({NOBODY})\n{code}"
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


# ---- exchanges ----


def test_ranks_meet_over_a_store_and_exchange_objects():
    before = num_descriptors()
    with star(4) as peers:
        everything = in_threads(*(lambda p=p: p.allgather({"rank": p.rank}) for p in peers))
        assert everything == [[{"rank": rank} for rank in range(4)]] * 4
        sent = in_threads(*(lambda p=p: p.bcast(("from", p.rank), 2) for p in peers))
        assert sent == [("from", 2)] * 4
        large = in_threads(*(lambda p=p: p.allgather(b"x" * 3_000_000)[p.rank] for p in peers))
        assert all(len(thing) == 3_000_000 for thing in large)
    assert num_descriptors() == before


def test_the_same_file_is_passed_to_all_as_a_descriptor():
    with star(3) as peers:
        descriptor = os.memfd_create("test")
        passed = in_threads(
            *(lambda p=p: p.pass_descriptor(descriptor if p.rank == 0 else -1) for p in peers)
        )
        os.write(descriptor, b"shared")
        assert len(set(passed)) == 3
        assert [os.pread(fd, 6, 0) for fd in passed] == [b"shared"] * 3
        assert not any(map(os.get_inheritable, passed))
        for fd in passed:
            os.close(fd)
        none = in_threads(*(lambda p=p: p.pass_descriptor(-1) for p in peers))
        assert none == [-1] * 3
        assert in_threads(*(lambda p=p: p.bcast(p.rank, 1) for p in peers)) == [1] * 3


def test_parts_are_made_by_their_members_alone_in_their_order():
    with star(4) as peers:
        ranks = (3, 0, 2)
        parts = in_threads(*(lambda r=r: peers[r].part(ranks, "a group") for r in ranks))
        assert [part.rank for part in parts] == [0, 1, 2]
        assert in_threads(*(lambda p=p: p.allgather(p.rank) for p in parts)) == [[0, 1, 2]] * 3
        again = in_threads(*(lambda r=r: peers[r].part(ranks, "another") for r in ranks))
        for part in (*parts, *again):
            part.free()


def test_ranks_that_have_one_color_are_parted_from_the_others():
    with star(4) as peers:
        parts = in_threads(*(lambda p=p: p.split(p.rank % 2) for p in peers))
        assert [(part.rank, part.size) for part in parts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
        for part in parts:
            part.free()


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_ends_is_named_to_all_that_wait_for_it(gone):
    with star(4) as peers:
        peers[gone].free()
        rest = [p for p in peers if p.rank != gone]
        failures = in_threads(*(lambda p=p: p.allgather(1) for p in rest))
        assert [str(failure) for failure in failures] == [
            f"rank {gone} has ended, or given up, while others waited for it"
        ] * 3
        with pytest.raises(LaunchError, match=f"rank {gone} has ended"):
            rest[0].allgather(2)  # it stays so


def test_a_member_that_does_not_come_is_named_to_those_that_have():
    with star(3) as peers:
        calls = (lambda r=r: peers[r].part((0, 1, 2), "late", 0.5).allgather(1) for r in (0, 1))
        for failure in in_threads(*calls):
            assert str(failure) == "rank 2 did not come within 0.5 s"
        failure = in_threads(lambda: peers[1].part((2, 1), "later", 0.2))[0]
        assert str(failure) == "rank 2 did not come within 0.2 s"


# ---- the Store ----


def test_worlds_follow_each_other_over_one_store():
    store = dist.HashStore()
    for _ in range(3):
        peers = in_threads(*(meets(store, rank, 2) for rank in range(2)))
        assert [p.rank for p in peers] == [0, 1]
        for one in peers:
            one.free()


def test_a_restarted_job_takes_no_record_of_the_one_before(monkeypatch):
    """Rank 1 has come the first time, and rank 0 not."""
    store = dist.HashStore()
    assert isinstance(in_threads(meets(store, 1, 2, 0.1))[0], LaunchError)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    peers = in_threads(*(meets(store, rank, 2) for rank in range(2)))
    assert [p.allgather for p in peers]
    for one in peers:
        one.free()


@pytest.mark.parametrize("came", [(0, 2), (1, 2)])
def test_ranks_that_do_not_come_in_time_are_named(came):
    before = num_descriptors()
    store = dist.HashStore()
    failures = in_threads(*(meets(store, rank, 5, 0.5) for rank in came))
    missing = ", ".join(str(rank) for rank in range(5) if rank not in came)
    for failure in failures:
        assert isinstance(failure, LaunchError)
        assert f"ranks {missing} of 5 did not come to init within 0.5 s" in str(failure)
    del failures
    assert num_descriptors() == before


def test_late_ranks_are_named_in_a_warning(caplog):
    store = dist.HashStore()

    def late():
        deadline = time.monotonic() + LIMIT_S
        while "rank 0 waits for rank 1 in init" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return meets(store, 1, 2)()

    peers = in_threads(
        lambda: through_store.meet(Place(store, 0, 2, LIMIT_S), 0.05),
        late,
    )
    for one in peers:
        one.free()


def test_ranks_meet_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(through_store, "PROC", str(tmp_path))
    store = dist.HashStore()
    peers = in_threads(*(meets(store, rank, 2) for rank in range(2)))
    assert in_threads(*(lambda p=p: p.allgather(p.rank) for p in peers)) == [[0, 1]] * 2
    for one in peers:
        one.free()


def test_a_hosts_name_may_have_any_bytes(monkeypatch):
    name = os.fsdecode(b"\xff\x1b[31m" + b"x" * 58)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    failures = in_threads(meets(dist.HashStore(), 1, 2, 0.1))
    assert "rank 0 of 2 did not come" in str(failures[0])
    assert through_store._shown(through_store._own_host()) == "???31m" + "x" * 58
    shown = own_host_name()
    assert shown.isprintable()
    assert shown.endswith("?[31m" + "x" * 58)


class WritesAfter:
    """A Store in which each record of one name is replaced as soon as it is written."""

    def __init__(self, name, change):
        self._store = dist.HashStore()
        self._name, self._change = name, change

    def set(self, key, record):
        if key.endswith(self._name):
            record = self._change(bytes(record))
        self._store.set(key, record)

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda record: b"x" * len(record), "something else than hvdlite writes"),
        (lambda record: record[:-1], r"bytes instead of"),
        (lambda record: record + b"x" * 100_000, r"bytes instead of"),
        (lambda record: b"", r"0 bytes instead of"),
        (lambda record: record[:8] + b"\0\x63" + record[10:], "different hvdlites"),
        (lambda record: record[:10] + b"\0\x02" + record[12:], "something else than hvdlite"),
    ],
    ids=["garbage", "short", "long", "empty", "version", "kind"],
)
def test_a_bad_record_in_the_store_is_an_error_that_says_so(change, text):
    before = num_descriptors()
    store = WritesAfter("bootstrap", change)
    failures = in_threads(meets(store, 0, 2, 0.2), meets(store, 1, 2))
    with pytest.raises(LaunchError, match=text):
        raise failures[1]
    assert isinstance(failures[0], LaunchError)
    del failures
    assert num_descriptors() == before


def test_who_knows_only_the_name_is_not_let_in():
    """And keeps nobody waiting: the token in the Store was changed for rank 1."""
    store = WritesAfter("bootstrap", lambda record: record[:40] + b"t" * 24 + record[64:])
    failures = in_threads(meets(store, 0, 2, 1.0), meets(store, 1, 2))
    assert "rank 1 of 2 did not come" in str(failures[0])
    assert "hung up" in str(failures[1])


@pytest.mark.parametrize(
    ("other", "text"),
    [((1, 3), "of 3 ranks, but rank 0 one of 2"), ((0, 2), "did not come")],
    ids=["size", "rank"],
)
def test_ranks_that_do_not_fit_together_are_told(other, text):
    store = dist.HashStore()
    failures = in_threads(meets(store, 0, 2, 1.0), meets(store, *other, 1.0))
    assert any(text in str(failure) for failure in failures), failures


def test_two_processes_of_one_rank_are_told():
    token = bytes(on_host.TOKEN_BYTES)
    listener = on_host.listen(b"two of one rank!")
    with contextlib.closing(on_host.Reception(listener, token, 3, str)) as reception:

        def calls():
            return on_host.call(b"two of one rank!", token, 1, 3, time.monotonic() + LIMIT_S)

        def receives():
            while True:
                reception.turn(0.1)

        failure, *called = in_threads(receives, calls, calls)
        assert "two processes are rank 1 of 3" in str(failure)
        for sock in (*reception.met.values(), *called):
            if isinstance(sock, socket.socket):
                sock.close()


def test_ranks_that_share_no_sockets_get_one_error_that_says_how_to_start():
    if os.geteuid():
        lacking("only root can make a network namespace")
    store = dist.HashStore()

    def elsewhere():
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0  # of this thread
        return meets(store, 2, 3)()

    failures = in_threads(meets(store, 0, 3), meets(store, 1, 3), elsewhere)
    host = socket.gethostname()
    assert len(set(map(str, failures))) == 1
    with pytest.raises(LaunchError) as raised:
        raise failures[0]
    assert str(raised.value).startswith(
        f"rank 2 on {host} can't meet rank 0 on {host}: the 3 ranks"
    )
    assert "`hvdrun -np 3 -H host1:N,host2:M python train.py`" in str(raised.value)


def test_a_rank_that_is_being_let_in_when_rank_0_gives_up_gets_the_same_error(monkeypatch):
    """It has connected, and rank 0 does not answer it any more."""
    store = dist.HashStore()
    connects = threading.Event()
    call = on_host.call

    def calls(*arguments):
        connects.set()
        return call(*arguments)

    def turn(self, timeout_s):
        connects.wait(LIMIT_S)
        store.set("hvdlite/0/world/1/trouble", through_store._report(3, 1))
        while not self._poll.poll(LIMIT_S * 1000):
            pass

    monkeypatch.setattr(on_host, "call", calls)
    monkeypatch.setattr(on_host.Reception, "turn", turn)
    failures = in_threads(meets(store, 0, 2), meets(store, 1, 2))
    assert str(failures[0]) == str(failures[1])
    assert "rank 1 on" in str(failures[0])


# ---- strangers ----

NAME = b"sixteen bytes..."
TOKEN = bytes(range(on_host.TOKEN_BYTES))


def connected():
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(on_host.address(NAME))
    return sock


def test_another_user_gets_not_a_byte():
    with contextlib.closing(on_host.Reception(on_host.listen(NAME), TOKEN, 2, str)) as reception:
        code = (
            "s = socket.socket(socket.AF_UNIX); s.connect(b'\\0' + sys.argv[1].encode())\n"
            "print('connected', flush=True); s.settimeout(60); print(s.recv(100), flush=True)"
        )
        with another_user(code, on_host.address(NAME)[1:].decode()) as stranger:
            assert stranger.stdout.readline() == "connected\n"
            reception.turn(LIMIT_S)
            assert stranger.stdout.readline() == "b''\n"
        assert reception.missing() == [1]


def test_a_listener_of_another_user_is_told_nothing():
    code = (
        "s = socket.socket(socket.AF_UNIX); s.bind(b'\\0' + sys.argv[1].encode()); s.listen(5)\n"
        "print('listens', flush=True); c = s.accept()[0]; c.settimeout(60)\n"
        "print(c.recv(100), flush=True)"
    )
    with another_user(code, on_host.address(NAME)[1:].decode()) as stranger:
        assert stranger.stdout.readline() == "listens\n"
        with pytest.raises(on_host.UnauthenticatedPeer, match=f"user {NOBODY}"):
            on_host.call(NAME, TOKEN, 1, 2, time.monotonic() + LIMIT_S)
        assert stranger.stdout.readline() == "b''\n"


def test_a_listener_of_the_same_user_must_know_the_token():
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(on_host.address(NAME))
        listener.listen()

        def pretends():
            sock, _ = listener.accept()
            sock.sendall(b"hvdlmeet" + bytes(32))
            while select.select([sock], [], [], LIMIT_S)[0] and sock.recv(1 << 16):
                sock.sendall(b"hvdlmeet" + bytes(32))
            sock.close()

        def calls():
            return on_host.call(NAME, TOKEN, 1, 2, time.monotonic() + LIMIT_S)

        _, failure = in_threads(pretends, calls)
        assert isinstance(failure, ConnectionError)
        assert "not of this job" in str(failure)


def test_a_silent_peer_and_one_that_sends_garbage_keep_nobody_waiting():
    with contextlib.closing(on_host.Reception(on_host.listen(NAME), TOKEN, 2, str)) as reception:
        silent = [connected() for _ in range(300)]  # more than are kept
        loud = connected()
        loud.sendall(os.urandom(200))

        def receives():
            while reception.missing():
                reception.turn(LIMIT_S)

        _, member = in_threads(
            receives, lambda: on_host.call(NAME, TOKEN, 1, 2, time.monotonic() + LIMIT_S)
        )
        assert set(reception.met) == {1}
        for sock in (*silent, loud, member, *reception.met.values()):
            sock.close()


def test_a_caller_waits_while_the_queue_is_full(monkeypatch):
    found_full = threading.Event()
    call = on_host.call

    def calls(*arguments):
        try:
            return call(*arguments)
        except TimeoutError:
            found_full.set()
            raise

    monkeypatch.setattr(on_host, "call", calls)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(on_host.address(NAME))
    listener.listen(0)
    listener.setblocking(False)
    with (
        contextlib.closing(on_host.Reception(listener, TOKEN, 2, str)) as reception,
        contextlib.closing(connected()),
    ):

        def receives():
            found_full.wait(LIMIT_S)
            while reception.missing():
                reception.turn(LIMIT_S)

        deadline = time.monotonic() + LIMIT_S
        _, member = in_threads(receives, lambda: on_host._reach(NAME, TOKEN, 1, 2, deadline))
        assert found_full.is_set()
        assert set(reception.met) == {1}
        for sock in (member, *reception.met.values()):
            sock.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"x" * 200,
        host_peers._HEADER.pack(b"hvdlpeer", 0, 1, 1 << 40),
        host_peers._HEADER.pack(b"hvdlpeer", 2, 1, 0),
        host_peers._HEADER.pack(b"hvdlpeer", 0, 7, 0),
        host_peers._HEADER.pack(b"hvdlpeer", host_peers._NO_DESCRIPTOR, 1, 0),
    ],
    ids=["garbage", "size", "no descriptor", "step", "kind"],
)
def test_what_is_no_frame_of_this_exchange_is_refused(frame):
    ours, theirs = socket.socketpair()
    peers = host_peers.HostPeers(0, (0, 1), {1: ours}, b"", LIMIT_S)
    theirs.sendall(frame)
    with pytest.raises(LaunchError, match=r"something else than a frame|out of step"):
        peers.allgather(1)
    theirs.close()
