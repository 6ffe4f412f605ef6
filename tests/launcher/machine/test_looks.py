"""What a keeper sees in /proc of its rank's processes."""

import json
import os
import subprocess
import sys

import psutil

from hvdrun.job.init_report import activity, read_look
from hvdrun.machine.looks import MOST_PROCESSES, look

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
