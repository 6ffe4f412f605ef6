"""What the supervisor of a host's ranks does when a keeper is gone."""

import os
import selectors
import socket
import threading
import uuid

import pytest

from hvdrun.agent.frames import (
    CLOSED,
    EXIT,
    GO,
    HEADER,
    HOST,
    KEEPER_GONE,
    MPI_JOB,
    NOTE,
    OUT,
    RANK,
    SIGNALLED,
    VARIABLES,
    frame,
    receive,
    send,
)
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.machine.shared_memory import FOLDER, mpichs_names


@pytest.fixture
def ranks(tmp_path):
    """LocalRanks, what they deliver, and the address for keepers."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "link"))
    listener.listen()
    delivered = []
    with selectors.DefaultSelector() as selector:
        found = LocalRanks(
            listener.detach(),
            selector,
            lambda kind, rank, payload: delivered.append((kind, rank, payload)),
            lambda: os.open(os.devnull, os.O_RDONLY),
            num_ranks=4,
        )
        yield found, delivered, str(tmp_path / "link")
        found.listener.close()


def hear(ranks):
    while ready := ranks.selector.select(0):
        for key, _ in ready:
            key.data()


def test_a_keeper_that_does_not_read_holds_up_nobody_and_gets_all_of_it_later(ranks):
    found, _, address = ranks
    found.variables = b"X=" + bytes(4 << 20)
    keeper = socket.socket(socket.AF_UNIX)
    keeper.connect(address)
    pipes = [os.pipe(), os.pipe()]
    send(keeper, frame(RANK, 0), [reader for reader, _ in pipes])
    unblocks = threading.Timer(20, keeper.shutdown, [socket.SHUT_RDWR])
    unblocks.start()
    hear(found)
    found.end(1.0)
    expected = frame(VARIABLES, payload=found.variables) + frame(GO) + found.ending
    got, given = receive(keeper)
    assert len(given) == 1  # rank 0's standard input
    while len(got) < len(expected) and (more := keeper.recv(1 << 20)):
        got += more
        hear(found)
    unblocks.cancel()
    assert got == expected
    assert not found.selector.select(0)
    keeper.close()
    hear(found)
    for fd in (*given, *(end for ends in pipes for end in ends)):
        os.close(fd)


@pytest.mark.parametrize("tells", [True, False])
def test_the_files_of_a_job_whose_keeper_was_killed_are_removed(ranks, tells):
    found, delivered, address = ranks
    job = uuid.uuid4().hex.encode()
    path = f"{FOLDER}/{mpichs_names(job)[0]}1"
    keeper = socket.socket(socket.AF_UNIX)
    keeper.connect(address)
    pipes = [os.pipe(), os.pipe()]
    send(keeper, frame(RANK, 1), [reader for reader, _ in pipes])
    hear(found)
    if tells:
        send(keeper, frame(MPI_JOB, 1, job), ())
    with open(path, "xb"):
        pass
    try:
        hear(found)
        assert os.path.exists(path)
        keeper.close()
        hear(found)
        assert os.path.exists(path) is not tells
    finally:
        if os.path.exists(path):
            os.unlink(path)
        for ends in pipes:
            for end in ends:
                os.close(end)
    assert delivered == [(RANK, 1, b""), (KEEPER_GONE, 1, b"")]


@pytest.mark.parametrize(
    ("key", "fds", "is_heard"), [(b"key", 0, True), (b"another", 0, False), (b"key", 1, False)]
)
def test_only_who_knows_the_key_may_want_something_on_another_host(ranks, key, fds, is_heard):
    found, _, address = ranks
    wishes = []
    found.secret, found.on_host = "key", lambda sock, wish: wishes.append((sock, wish))
    with socket.socket(socket.AF_UNIX) as process:
        process.connect(address)
        send(process, frame(HOST, payload=key + b"\0b\0\0sh\0true\0ssh"), [0] * fds)
        hear(found)
        assert [wish for _, wish in wishes] == [[b"b", b"", b"sh", b"true", b"ssh"]] * is_heard
        assert not found.keepers
        for sock, _ in wishes:
            sock.close()


@pytest.mark.parametrize(
    "message",
    [
        HEADER.pack(EXIT, 1, 1 << 30),
        *(frame(EXIT, 1, how) for how in (b"", b"code 3", b"code x 5", b"felt 3 5", b"shm 7 6 5")),
        frame(EXIT, 1, b"code 3 \xb2"),
        frame(EXIT, 2, b"code 3 5"),
        frame(CLOSED, 1, b"closed"),
        frame(EXIT, 1, b"code 3\t123"),
        frame(SIGNALLED, 1, b"10 1"),
        frame(SIGNALLED, 1, b"10 1 \xff"),
        frame(NOTE, 1, b"W" + bytes(1025)),
        frame(OUT, 1, b"not from its pipe"),
        frame(RANK, 1),
        frame(b"?", 1),
    ],
)
def test_a_keeper_that_sends_nonsense_is_hung_up_on_and_named(ranks, message):
    found, delivered, address = ranks
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.connect(address)
        pipes = [os.pipe(), os.pipe()]
        send(keeper, frame(RANK, 1), [reader for reader, _ in pipes])
        hear(found)
        keeper.sendall(message)
        hear(found)
        first, (kind, rank, what) = delivered
        assert (first, kind, rank) == ((RANK, 1, b""), KEEPER_GONE, 1)
        assert what.startswith((b"a message of ", b"the end of ", b"a note of ", b"a second")) or (
            what.endswith(b" in place of a number")
        )
        assert not found.keepers
    for ends in pipes:
        for end in ends:
            os.close(end)


@pytest.mark.parametrize("rank", [-1, 4, 1 << 30])
def test_a_rank_that_the_job_does_not_have_is_not_taken(ranks, rank):
    found, delivered, address = ranks
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.connect(address)
        keeper.sendall(frame(RANK, rank))
        hear(found)
        assert keeper.recv(1) == b""
    assert delivered == []
