"""What a process does and waits for, against processes that do just that."""

import contextlib
import errno
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import psutil
import pytest

from hvdrun.machine import looks
from hvdrun.machine.looks import CALLS, MOST_PROCESSES, kernel_wait, look
from hvdrun.reports.looks import activity, read_look
from tests.harness.needs import lacking

# Computes while a child of it sleeps; each says when it is up.
WORKS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
while True:
    pass
"""


def test_a_process_is_seen_with_its_children_and_the_cpu_that_it_uses():
    process = subprocess.Popen([sys.executable, "-c", WORKS], stdout=subprocess.PIPE, text=True)
    try:
        child = int(process.stdout.readline())
        before = read_look(look(process.pid))
        used = psutil.Process(process.pid).cpu_times
        begin = sum(used()[:2])
        while sum(used()[:2]) < begin + 0.3:
            pass
        now = read_look(look(process.pid))
        assert [(p.pid, p.parent) for p in now.processes] == [
            (process.pid, os.getpid()),
            (child, process.pid),
        ]
        assert now.processes[0].cpu_s - before.processes[0].cpu_s >= 0.25
        assert not now.processes[0].has_mpi
        assert now.processes[0].waits == ""
        while not (waits := read_look(look(process.pid)).processes[1].waits):
            pass  # it still starts
        assert waits == "waits for data from a pipe"
        name = os.path.basename(sys.executable)
        assert now.processes[0].command.startswith(f"{name} -c import subprocess, sys child =")
        assert now.at > before.at
    finally:
        psutil.Process(child).kill()
        process.kill()
        process.wait()
        process.stdout.close()
    assert json.loads(look(process.pid))["processes"] == []
    assert activity(before, read_look(look(process.pid))) == "has just ended"


def test_a_look_has_the_quotas_and_for_how_long_the_process_is_stopped(monkeypatch):
    monkeypatch.setattr(looks, "throttling", lambda pid: {f"/cpu/{pid}": (10, 2, 0.1, 5.0)})
    found = read_look(look(os.getpid(), None, 4.5))
    assert (found.stopped_s, found.quotas) == (4.5, {f"/cpu/{os.getpid()}": (10, 2)})
    assert read_look(look(os.getpid())).stopped_s is None
    for wrong in ({"quotas": 3}, {"quotas": {"x": [1]}}, {"stopped_s": "long"}):
        assert read_look(json.dumps({"at": 1, "processes": [], **wrong}).encode()) is None


def test_a_look_has_no_more_than_some_processes():
    sleepers = f"for i in $(seq {2 * MOST_PROCESSES}); do sleep 60 & done; echo up; wait"
    process = subprocess.Popen(["sh", "-c", sleepers], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"up\n"
        assert len(read_look(look(process.pid)).processes) == MOST_PROCESSES
    finally:
        for each in psutil.Process(process.pid).children():
            each.kill()
        process.wait()
        process.stdout.close()


def test_a_look_does_not_read_the_memory_of_a_process_that_hangs_in_the_kernel(monkeypatch):
    pid = os.getpid()
    monkeypatch.setattr(looks, "_table", lambda: ({pid: (1, "D", 0.5)}, {}))
    monkeypatch.setattr(looks, "_has_mpi", lambda _: pytest.fail("it reads the memory"))
    with open("/proc/self/comm") as name:
        assert read_look(look(pid)).processes[0].command == name.read().strip()


def test_a_keeper_that_can_open_no_file_does_not_answer(monkeypatch):
    def fail(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(looks.os, "listdir", fail)
    assert look(os.getpid()) == b""
    assert read_look(b"") is None


SETUP = "import fcntl, os, select, signal, socket, subprocess, threading, time\n"
UP = "\nprint('up', flush=True)\n"
# What each program does before it says that it is up, what it then does, and what that is in words.
WAITS = {
    "sleep": ("", "time.sleep(600)", "sleeps"),
    "lock": (
        "lock = threading.Lock(); lock.acquire()",
        "lock.acquire()",
        "waits for a lock or another thread",
    ),
    "pipe": ("r, w = os.pipe()", "os.read(r, 1)", "waits for data from a pipe"),
    "full pipe": ("r, w = os.pipe()", "os.write(w, bytes(1 << 22))", "waits for room in a pipe"),
    "named pipe": ("", "os.open('fifo', os.O_RDONLY)", "waits until a file is opened or found"),
    "file's lock": (
        "held = open('data.lock', 'w'); fcntl.flock(held, fcntl.LOCK_EX); mine = open('data.lock')",
        "fcntl.flock(mine, fcntl.LOCK_EX)",
        "waits for a lock on the file {folder}/data.lock",
    ),
    "socket": ("a, b = socket.socketpair()", "a.recv(1)", "waits for data from a socket"),
    "full socket": (
        "a, b = socket.socketpair()",
        "a.sendall(bytes(1 << 24))",
        "waits for room in a socket",
    ),
    "listener": (
        "s = socket.create_server(('127.0.0.1', 0))",
        "s.accept()",
        "waits for somebody to connect to its socket",
    ),
    "child": (
        "child = subprocess.Popen(['sleep', '600'])",
        "child.wait()",
        "waits for a child process to end",
    ),
    "select": (
        "r, w = os.pipe()",
        "select.select([r], [], [])",
        "waits for a file, a socket or a pipe",
    ),
    "epoll": (
        "r, w = os.pipe(); poll = select.epoll(); poll.register(r)",
        "poll.poll()",
        "waits for a file, a socket or a pipe",
    ),
    "terminal": (
        "master, slave = os.openpty(); print(os.ttyname(slave), flush=True)",
        "os.read(slave, 1)",
        "waits for input from the terminal {said}",
    ),
}


@contextlib.contextmanager
def running(before, then, folder):
    """A process that has just begun `then`, in a session of its own, and what it has said."""
    process = subprocess.Popen(
        [sys.executable, "-c", SETUP + before + UP + then],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        said = [line.strip() for line in iter(process.stdout.readline, "up\n")]
        yield process.pid, "".join(said)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def comes_to(pid, words):
    """Whether the process comes to wait for that. Returns what it waited for last."""
    end = time.monotonic() + 60
    while (found := kernel_wait(pid, state_of(pid))) != words and time.monotonic() < end:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_named_by_what_it_is_for(name, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    before, then, words = WAITS[name]
    with running(before, then, tmp_path) as (pid, said):
        words = words.format(folder=os.path.realpath(tmp_path), said=said)
        assert comes_to(pid, words) == words


@pytest.mark.parametrize("name", ["sleep", "lock", "pipe", "select"])
def test_the_function_of_the_kernel_says_it_where_the_call_can_not_be_seen(
    name, tmp_path, monkeypatch
):
    reads = looks._read
    monkeypatch.setattr(looks, "_read", lambda p, n: "" if n == "syscall" else reads(p, n))
    before, then, words = WAITS[name]
    with running(before, then, tmp_path) as (pid, _):
        assert comes_to(pid, words) == words


def test_a_process_that_hangs_and_can_not_be_asked_does_not_hold_up_who_asks(monkeypatch):
    def read(_, name):
        if name == "syscall":
            time.sleep(600)
        return "nfs_wait_bit_killable"

    monkeypatch.setattr(looks, "_read", read)
    assert kernel_wait(os.getpid(), "D") == "waits for a file server"


def test_a_process_that_its_cgroup_has_frozen_is_said_to_be_so(tmp_path):
    mounts = [pathlib.Path("/sys/fs/cgroup/unified"), pathlib.Path("/sys/fs/cgroup")]
    mount = next((at for at in mounts if os.access(at / "cgroup.procs", os.W_OK)), None)
    if mount is None:
        pytest.skip("no cgroup of version 2 can be made here")
    group = mount / f"hvdlite-test-{os.getpid()}"
    group.mkdir()
    try:
        with running("", "time.sleep(600)", tmp_path) as (pid, _):
            (group / "cgroup.procs").write_text(str(pid))
            (group / "cgroup.freeze").write_text("1")
            try:
                assert comes_to(pid, "is frozen by its cgroup") == "is frozen by its cgroup"
            finally:
                (group / "cgroup.freeze").write_text("0")
    finally:
        while "populated 1" in (group / "cgroup.events").read_text():
            time.sleep(0.01)
        group.rmdir()


def test_a_file_of_a_file_server_is_said_to_be_one(monkeypatch):
    mounts = "/dev/sda / ext4 rw 0 0\nserver9:/home /home nfs4 rw 0 0\n"
    monkeypatch.setattr(looks, "open", lambda *_, **__: io.StringIO(mounts), raising=False)
    about = looks._about
    assert about("read", "/home/me/x") == "reads from /home/me/x (nfs4 of server9:/home)"
    assert about("read", "/homes/me/x") == "reads from /homes/me/x"


@pytest.mark.parametrize("text", ["", "running", "-1 0x0 0x0", "99999 0x1 0x2", "nonsense 1 2"])
def test_of_a_call_that_is_not_known_nothing_is_said(text):
    assert looks._words(os.getpid(), text) == ""


def test_a_process_that_has_ended_or_runs_waits_for_nothing():
    child = subprocess.Popen(["true"])
    child.wait()
    assert kernel_wait(child.pid, "S") == ""
    assert kernel_wait(os.getpid(), "R") == ""


@pytest.mark.parametrize(
    ("column", "headers"),
    [
        (2, ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h"]),
        (
            3,
            [
                "/usr/include/asm-generic/unistd.h",
                "/usr/aarch64-linux-gnu/include/asm-generic/unistd.h",
            ],
        ),
    ],
)
def test_the_numbers_of_the_calls_are_those_of_the_kernels_headers(column, headers):
    found = [path for path in headers if os.path.exists(path)]
    if not found:
        lacking(f"none of {headers} is here")
    with open(found[0]) as file:
        rows = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", file.read(), re.MULTILINE)
    kernel = {name.replace("fstatat", "newfstatat"): int(number) for name, number in rows}
    kernel |= {name: int(number) for name, number in rows}
    assert {row[0]: row[column] for row in CALLS} == {
        row[0]: kernel.get(row[0], -1) for row in CALLS
    }
