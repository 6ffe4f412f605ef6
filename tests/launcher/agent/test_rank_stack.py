"""A rank's Python stack, as its keeper reads it. The rank is a fork of this process."""

import contextlib
import ctypes
import faulthandler
import os
import re
import select
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from hvdlite.world.telling import launcher_link, stacks
from hvdrun.agent.frames import LOOK, LOOKED, WITH_STACK, frame, receive, send, unpack
from hvdrun.agent.rank.keeper import Keeper
from hvdrun.agent.rank.notes import RankNotes, RankStack, RankStacks
from hvdrun.machine.notes import INIT_BEGUN, STACK

# ---- what a rank does; `wait` is a pipe to which this process writes when the rank is to go on


def in_c(wait):
    """The main thread holds the GIL while it is in C."""
    ctypes.PyDLL(None).read(wait, ctypes.create_string_buffer(1), 1)


def for_a_lock(wait):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def in_a_loop(wait):
    while True:
        pass


def deep(wait, calls=150):
    if calls:
        deep(wait, calls - 1)
    os.read(wait, 1)


def stopped(wait):
    os.kill(os.getpid(), signal.SIGSTOP)


def without_the_file(wait):
    os.closerange(3, wait)
    os.closerange(wait + 1, 1000)
    os.read(wait, 1)


def with_another_file(wait):
    os.dup2(os.open("mine", os.O_RDWR | os.O_CREAT), file_of_stack())
    os.read(wait, 1)


def file_of_stack():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "hvdrun-stack" in os.readlink(f"/proc/self/fd/{name}"):
                return int(name)
    raise AssertionError("it has none")


def blocked(wait):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.read(wait, 1)


class Rank:
    """A fork that has offered its stack."""

    def __init__(self, folder, does):
        told = []
        environment = {}
        notes = RankNotes(environment, select.poll(), lambda note, fds: told.append((note, fds)))
        wait, self.held = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.held)
            self._run(folder, environment, does, wait)
        os.close(wait)
        notes.begin()
        while not told:
            notes.hear()
        ((note, (fd,)),) = told
        assert note[:1] == STACK
        self.stack = RankStack(note[1:], fd)
        if notes.ours is not None:
            notes.ours.close()

    @staticmethod
    def _run(folder, environment, does, wait):
        code = 1
        try:
            os.chdir(folder)
            os.environ.update(environment)
            launcher_link._pid = stacks._offered_by = None
            stacks.offer()
            does(wait)
            code = 0
        finally:
            os._exit(code)

    def is_in(self, state):
        """Waits until the kernel says so."""
        path = f"/proc/{self.pid}/stat"
        found = ""
        while found != state:
            assert found != "Z", "it has ended"
            with open(path) as file:
                found = file.read().rpartition(")")[2].split()[0]

    def end(self):
        os.close(self.held)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.stack.close()

    def code(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def rank(tmp_path, request):
    with contextlib.ExitStack() as ends:
        found = Rank(tmp_path, request.param)
        ends.callback(found.end)
        yield found


@contextlib.contextmanager
def way_to_a_keeper(monkeypatch):
    """What this process tells as a rank."""
    told, environment = [], {}
    notes = RankNotes(environment, select.poll(), lambda note, fds: told.append((note, fds)))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher_link, "_pid", None)
    monkeypatch.setattr(stacks, "_offered_by", None)
    monkeypatch.setattr(stacks, "_offered", None)
    copy, theirs = os.dup(notes.theirs.fileno()), notes.theirs.fileno()
    notes.begin()
    os.dup2(copy, theirs)
    os.close(copy)

    def hear():
        notes.hear()
        heard = told.copy()
        told.clear()
        return heard

    try:
        yield hear
    finally:
        os.close(theirs)
        notes.ours.close()


def functions(frames):
    return [function for _, _, function, _ in frames]


@pytest.mark.parametrize(
    ("rank", "state"),
    [(in_c, "S"), (for_a_lock, "S"), (in_a_loop, "R")],
    indirect=["rank"],
)
def test_the_stack_of_the_main_thread_is_read_whatever_it_does(rank, state, request):
    what = request.node.callspec.params["rank"].__name__
    rank.is_in(state)
    while functions(rank.stack.read()[0])[:1] != [what]:
        pass  # it is about to do it
    for _ in range(3):
        frames, why = rank.stack.read()
        assert why == ""
        assert functions(frames)[:3] == [what, "_run", "__init__"]
        assert {(file, library) for file, _, _, library in frames[:3]} == {(__file__, "")}
        assert all(line > 0 for _, line, _, _ in frames)


@pytest.mark.parametrize("rank", [deep], indirect=True)
def test_of_a_deep_stack_the_innermost_calls_are_read(rank):
    rank.is_in("S")
    while functions(rank.stack.read()[0]) != ["deep"] * 100:
        pass  # it is about to be there


@pytest.mark.parametrize("rank", [stopped], indirect=True)
def test_of_a_stopped_rank_nothing_is_read_until_it_goes_on(rank):
    rank.is_in("T")
    assert rank.stack.read() == ([], "")
    os.kill(rank.pid, signal.SIGCONT)
    assert rank.code() == 0  # no signal was waiting for it


@pytest.mark.parametrize("rank", [in_c], indirect=True)
def test_an_earlier_stack_is_not_that_of_a_stopped_rank(rank):
    rank.is_in("S")
    frames, _ = rank.stack.read()
    assert frames
    os.kill(rank.pid, signal.SIGSTOP)
    rank.is_in("T")
    assert rank.stack.read() == ([], "")


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (without_the_file, "it has closed the file for its stack"),
        (with_another_file, "it has closed the file for its stack"),
        (blocked, r"it is ending, or has changed what signal \d+ does, so its stack can't be read"),
    ],
    indirect=["rank"],
)
def test_a_rank_that_has_changed_what_is_needed_goes_on_and_is_said_to(rank, why, tmp_path):
    rank.is_in("S")
    frames, found = rank.stack.read()
    assert frames == []
    assert re.fullmatch(why, found)
    mine = tmp_path / "mine"
    assert not mine.exists() or mine.read_bytes() == b""
    os.write(rank.held, b"x")
    assert rank.code() == 0


@pytest.mark.parametrize("rank", [in_c], indirect=True)
def test_of_a_rank_that_has_ended_nothing_is_read(rank):
    os.kill(rank.pid, signal.SIGKILL)
    assert rank.code() == -signal.SIGKILL
    assert rank.stack.read() == ([], "it has closed the file for its stack")


def test_a_stack_is_offered_again_and_another_one_where_its_file_is_closed(monkeypatch):
    with way_to_a_keeper(monkeypatch) as hear, contextlib.ExitStack() as ends:

        def offered():
            stacks.offer()
            ((note, (fd,)),) = hear()
            found = RankStack(note[1:], fd)
            ends.callback(found.close)
            ends.callback(faulthandler.unregister, found.number)
            return found

        first, again = offered(), offered()
        assert (again.number, again.their_fd) == (first.number, first.their_fd)
        assert os.path.sameopenfile(again.fd, first.fd)
        os.close(first.their_fd)
        assert first.read() == ([], "it has closed the file for its stack")
        other = offered()
        assert other.number != first.number
        assert other.read()[0]
        os.close(other.their_fd)


def test_a_fork_of_the_process_that_has_offered_its_stack_may_be_the_rank(monkeypatch):
    with way_to_a_keeper(monkeypatch) as hear:
        stacks.offer()  # as the import of hvdlite does
        ((note, (fd,)),) = hear()
        os.close(fd)
        child = os.fork()
        if not child:
            os._exit(0 if launcher_link.tell(INIT_BEGUN) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert hear() == [(INIT_BEGUN, [])]
        words = note[1:].split(b"\0")[0].split()
        faulthandler.unregister(int(words[1]))
        os.close(int(words[2]))


def test_a_note_that_makes_no_sense_is_refused():
    outside = (b"1 9999999999999 3", b"1 0 3", b"1 65 3", b"0 2 3", b"-1 2 3", b"1 2 -1")
    huge = (b"9" * 30 + b" 2 3", b"1 2 99999999999", b"9" * 5000 + b" 2 3")
    for note in (b"", b"x y z", b"1 2", b"1 2 3 4", b"\xff\0\0", *outside, *huge):
        with pytest.raises(ValueError, match=r".*"):
            RankStack(note, 0)


def offer_by(stacks, process):
    """A note of that process, which has the file."""
    path = f"/proc/{process.pid}/fd/0"
    stacks.add(f"{process.pid} 40 0".encode(), os.open(path, os.O_RDONLY))


def test_a_program_that_has_ended_no_longer_shows_its_stack_for_the_ranks_own(tmp_path):
    stacks = RankStacks()
    assert stacks.newest() is None
    descriptors = len(os.listdir("/proc/self/fd"))
    processes = []
    for number in range(12):  # more than are kept
        Path(tmp_path, f"{number}").touch()
        with open(tmp_path / f"{number}") as own_file:
            processes.append(subprocess.Popen(["sleep", "1000"], stdin=own_file))
        offer_by(stacks, processes[-1])
        assert stacks.newest().pid == processes[-1].pid
    assert len(os.listdir("/proc/self/fd")) == descriptors + 8
    for left in (11, 10, 5):
        for process in processes[left:]:
            process.kill()
            process.wait()
        assert stacks.newest().pid == processes[left - 1].pid
    offer_by(stacks, processes[4])
    assert stacks.newest().pid == processes[4].pid
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    processes[4].kill()
    processes[4].wait()
    assert stacks.newest().read() == ([], "it has closed the file for its stack")
    stacks.newest().close()
    for process in processes[:4]:
        process.kill()
        process.wait()


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError])
def test_a_keeper_that_can_not_look_says_so_and_goes_on(error):
    class Broken:
        def read(self):
            raise error

    ours, theirs = socket.socketpair()
    with ours, theirs:
        keeper = Keeper(theirs, -1, 3, 0)
        keeper.stacks.newest = Broken
        send(ours, frame(LOOK, payload=WITH_STACK))
        keeper._hear()
        data, _ = receive(ours)
    assert list(unpack(bytearray(data))) == [(LOOKED, 3, b"")]


@pytest.mark.parametrize("line", ["9" * 5000, "٣", "-1", "1e9"])
def test_a_line_number_that_is_none_is_harmless(line, tmp_path):
    path = tmp_path / "stack"
    path.write_text(f'  File "a.py", line {line} in f\n  File "b.py", line 7 in g\n')
    fd = os.open(path, os.O_RDONLY)
    stack = RankStack(f"{os.getpid()} 40 {fd}".encode(), fd)
    stack._ask = lambda: ""
    assert stack.read() == ([["b.py", 7, "g", ""]], "")
    stack.close()


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/home/me/train.py", ""),
        ("/home/me/hvdlite/train.py", ""),
        ("/venv/lib/python3.11/site-packages/hvdlite/world/mpi.py", "hvdlite"),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", "torch"),
        ("/venv/lib/python3.11/site-packages/tqdm/std.py", "tqdm"),
        ("/venv/lib/python3.11/site-packages/six.py", "six"),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", "yaml"),
        ("/usr/lib/python3.11/threading.py", "Python"),
        ("<frozen runpy>", "Python"),
        ("<string>", ""),
    ],
)
def test_whose_code_a_call_is_in(file, library):
    site = "/venv/lib/python3.11/site-packages"
    folders = (f"{site}/hvdlite", f"{site}/torch", "/usr/lib/python3.11")
    stack = RankStack("\0".join(["1 2 3", *folders]).encode(), -1)
    text = f'Stack (most recent call first):\n  File "{file}", line 7 in call\n'
    assert stack.frames_in(text) == [[file, 7, "call", library]]
