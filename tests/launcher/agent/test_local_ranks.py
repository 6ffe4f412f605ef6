"""What the supervisor of a host's ranks does when a keeper is gone."""

import os
import selectors
import socket
import uuid

import pytest

from hvdrun.agent.frames import KEEPER_GONE, MPI_JOB, RANK, frame, send
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.agent.shared_files import mpichs_names
from hvdrun.machine.shared_memory import FOLDER


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
            lambda kind, rank, payload: delivered.append((kind, rank)),
            lambda: os.open(os.devnull, os.O_RDONLY),
        )
        yield found, delivered, str(tmp_path / "link")
        found.listener.close()


def hear(ranks):
    while ready := ranks.selector.select(0):
        for key, _ in ready:
            key.data()


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
    assert delivered == [(RANK, 1), (KEEPER_GONE, 1)]
