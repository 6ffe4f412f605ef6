"""What a keeper sees in /proc of its rank's processes."""

import errno
import json
import os
import subprocess
import sys

import psutil
import pytest

from hvdrun.machine import looks
from hvdrun.machine.looks import MOST_PROCESSES, look
from hvdrun.reports.looks import activity, read_look

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
