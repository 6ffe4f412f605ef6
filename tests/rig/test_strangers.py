"""Other users of the hosts, while a job runs there."""

import contextlib
import signal
import subprocess

import psutil
import pytest

from tests.rig.attack import attack
from tests.rig.conftest import WAITS, job

pytestmark = [pytest.mark.rig, pytest.mark.long]

HOSTS = ("-H", "server1:1,server2:2")


def test_another_user_of_the_hosts_runs_nothing_as_the_owner_of_a_job(rig, hvdrun):
    with attack(rig) as attacker:
        done = hvdrun(*HOSTS, "bash", "-c", "sleep 0.5; echo ok")
    assert attacker.ran_as == set()
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] ok", "[1] ok", "[2] ok"], done
    assert len(attacker.tried) == 2  # a name for each host, which did not help


def test_two_terminals_without_a_secret_are_safe_from_another_user_of_the_machine(rig, python):
    job = [python.with_name("hvdrun"), "-np", "2", "--rendezvous", "localhost", "--nodes", "2"]
    script = "sleep 0.5; echo ok"
    with attack(rig) as attacker, contextlib.ExitStack() as stack:
        # Node 1 ends with node 0's exit code, and only node 0 shows what the ranks print.
        nodes = [
            stack.enter_context(
                subprocess.Popen(
                    rig.inside("server1", *job, "--node-rank", str(n), "bash", "-c", script),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for n in (1, 0)
        ]
        other, first = [(node.communicate(timeout=60)[0], node.returncode) for node in nodes]
    assert attacker.ran_as == set()
    assert (first[1], other[1]) == (0, 0), (first, other)
    assert first[0].count("] ok\n") == 2, first
    # The job's name, that by which nodes meet, and the one by which `reach` finds node 0.
    assert len(attacker.tried) == 3


def test_no_command_line_on_any_host_holds_the_secret_of_a_job(rig, python):
    secrets, lines = set(), []
    command = [python.with_name("hvdrun"), *HOSTS, python, "-c", WAITS]
    with job(rig.inside("server1", *command), ranks=3) as running:
        for _, process in rig.members():
            with contextlib.suppress(psutil.Error):
                secrets.add(process.environ().get("HVDRUN_LINK"))
                lines.append(" ".join(process.cmdline()))
        running.send_signal(signal.SIGINT)
        running.wait(60)
    (secret,) = secrets - {None}
    assert any("agent.py host" in line for line in lines)
    assert not [line for line in lines if secret in line]


# Prints which of the words pass by on the network, once its input ends.
SNIFFS = """
import socket, sys, threading
words, seen, tail = sys.argv[1:], set(), b""
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
packets.settimeout(0.2)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
print("listens", flush=True)
while True:
    try:
        data = packets.recv(1 << 17)
    except TimeoutError:
        if over.is_set():
            break
        continue
    seen.update(word for word in words if word.encode() in data)
print(*sorted(seen))
"""
# One word travels by MPI: it shows that the sniffer sees what is there to see.
TELLS = """
import os
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.bcast("a-word-of-mpis")
print(os.environ["API_KEY"], os.environ.get("HVDRUN_LINK"), flush=True)
comm.barrier()
"""


def test_whoever_reads_the_network_sees_no_variable_of_the_ranks(rig, python, monkeypatch):
    monkeypatch.setenv("API_KEY", "a-value-of-the-users")
    words = ("a-value-of-the-users", "a-word-of-mpis", "given-by-option")
    sniffer = subprocess.Popen(
        rig.inside("server1", python, "-c", SNIFFS, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sniffer.stdout.readline() == "listens\n"
    command = [python.with_name("hvdrun"), "-x", "OTHER=given-by-option", *HOSTS]
    done = subprocess.run(
        rig.inside("server1", *command, python, "-c", TELLS),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    seen, _ = sniffer.communicate(timeout=30)
    lines = [f"[{rank}] a-value-of-the-users None" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == lines, done
    assert seen == "a-word-of-mpis\n"
