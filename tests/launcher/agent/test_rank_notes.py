"""The way of a rank's notes to its keeper. The rank is this process."""

import os
import select
import socket

import pytest

from hvdlite.world.bootstrap.mpi import rank_process
from hvdlite.world.telling import launcher_link
from hvdrun.agent.rank import notes as rank_notes
from hvdrun.agent.rank.notes import RankNotes
from hvdrun.machine.notes import INIT_BEGUN, INIT_DONE, KINDS, VARIABLE, descriptor


class Way:
    """A keeper's end, and the rank's."""

    def __init__(self):
        self.told = []
        self.given = []
        self.environment = {}
        self.poll = select.poll()
        self.notes = RankNotes(self.environment, self.poll, self._tell)
        self.fd = descriptor(self.environment[VARIABLE])
        assert os.get_inheritable(self.fd)

    def _tell(self, note, fds):
        self.told.append(note)
        self.given += fds

    def begin(self):
        """As if spawn had given the rank its end."""
        copy = os.dup(self.fd)
        number = self.fd
        self.notes.begin()
        os.dup2(copy, number)
        os.close(copy)

    def hear(self):
        self.notes.hear()
        return list(self.told)


@pytest.fixture
def way(monkeypatch):
    found = Way()
    found.begin()
    monkeypatch.setenv(VARIABLE, found.environment[VARIABLE])
    monkeypatch.setattr(launcher_link, "_pid", None)
    yield found
    if descriptor(found.environment[VARIABLE]) is not None:
        os.close(found.fd)
    if found.notes.ours is not None:
        found.notes.ours.close()


def test_notes_arrive_whole_and_in_order(way):
    assert launcher_link.tell(INIT_BEGUN)
    assert launcher_link.tell(INIT_DONE)
    assert way.hear() == [INIT_BEGUN, INIT_DONE]
    assert launcher_link.tell(INIT_BEGUN)
    assert way.hear() == [INIT_BEGUN, INIT_DONE, INIT_BEGUN]


@pytest.mark.parametrize(
    "note", [b"?", b"", INIT_BEGUN + bytes(KINDS[INIT_BEGUN] + 1), b"\xff" * 60_000], ids=len
)
def test_what_is_no_note_is_dropped(way, note):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=os.dup(way.fd)) as end:
        end.send(note)
        end.send(INIT_DONE)
    assert way.hear() == ([] if note == b"" else [INIT_DONE])  # an empty message is like the end


def test_descriptors_come_with_their_note_and_with_no_other(way, tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    with (tmp_path / "file").open("w+b") as file:
        assert launcher_link.tell(INIT_BEGUN, fds=[file.fileno()])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=os.dup(way.fd)) as end:
            socket.send_fds(end, [b"?"], [file.fileno()])
        assert way.hear() == [INIT_BEGUN]
        (fd,) = way.given
        assert os.path.sameopenfile(fd, file.fileno())
        assert not os.get_inheritable(fd)
        os.close(fd)
    assert set(os.listdir("/proc/self/fd")) == before


def test_without_hvdrun_nothing_is_told(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not launcher_link.tell(INIT_BEGUN)


@pytest.mark.parametrize("value", ["x", "-1:2:3", f"{10**30}:1:1", "1", ":", "²:1:1"])
def test_a_variable_that_makes_no_sense_does_no_harm(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert not launcher_link.tell(INIT_BEGUN)


def test_another_file_under_the_number_of_the_descriptor_gets_no_note(way, tmp_path):
    ours, theirs = socket.socketpair()
    with (tmp_path / "file").open("wb") as file, ours, theirs:
        for other in (file, theirs):
            os.dup2(other.fileno(), way.fd)
            assert not launcher_link.tell(INIT_BEGUN)
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
    os.close(way.fd)
    assert not launcher_link.tell(INIT_BEGUN)
    assert (tmp_path / "file").read_bytes() == b""
    assert way.hear() == []


def test_a_program_that_the_rank_starts_tells_nothing(way, monkeypatch):
    monkeypatch.setenv("HVDLITE_RANK_PROCESS", rank_process(os.environ))
    assert launcher_link.tell(INIT_BEGUN), "the rank itself"
    monkeypatch.setenv("HVDLITE_RANK_PROCESS", f"{os.getppid()}:///")
    assert not launcher_link.tell(INIT_DONE)
    assert way.hear() == [INIT_BEGUN]


def test_a_rank_that_closes_its_end_is_listened_to_no_more(way):
    assert launcher_link.tell(INIT_BEGUN)
    assert way.notes.hear()
    os.close(way.fd)
    assert not way.notes.hear()
    assert way.notes.hear()
    assert way.hear() == [INIT_BEGUN]
    assert way.notes.ours is None
    assert way.poll.poll(0) == []


def test_a_rank_whose_keeper_does_not_listen_goes_on(way):
    sent = 0
    while launcher_link.tell(INIT_BEGUN):
        sent += 1
    assert way.hear() == [INIT_BEGUN] * sent
    way.notes.ours.close()
    way.notes.ours = None
    assert not launcher_link.tell(INIT_BEGUN)


def test_a_rank_that_writes_without_an_end_is_heard_so_long_only(way, monkeypatch):
    monkeypatch.setattr(rank_notes, "MOST_NOTES", 1)
    monkeypatch.setattr(rank_notes.time, "monotonic", lambda: way.notes.begun_s + 2.0)
    for _ in range(5):
        launcher_link.tell(INIT_BEGUN)
    assert way.hear() == [INIT_BEGUN] * 3
    assert way.notes.ours is None


def test_a_fork_of_a_rank_tells_nothing(way):
    assert launcher_link.tell(INIT_BEGUN)
    child = os.fork()
    if child == 0:
        os._exit(launcher_link.tell(INIT_DONE))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert way.hear() == [INIT_BEGUN]
