"""The same command on every host, and no sshd on any of them: hosts find each other as platforms
tell them to, and whoever else is on the network is kept out."""

import json
import re
import secrets
import signal
import subprocess

import pytest

from tests.harness.programs import Finished
from tests.harness.worlds import end_tree
from tests.rig.conftest import HOSTS

pytestmark = [pytest.mark.rig, pytest.mark.long]

LIMIT_S = 60.0
PORT = 29800
NAMES = [f"server{number}" for number in range(1, HOSTS + 1)]
JOB = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
sum = world.allreduce(10 ** world.rank)
leaked = [n for n, v in os.environ.items() if "SECRET" in n or v == {secret!r}]
print(os.uname().nodename, world.rank, world.size, sum, leaked, flush=True)
"""


@pytest.fixture(scope="module")
def hosts(_rig):
    """The hosts, without an ssh server."""
    for host in NAMES:
        _rig("exec", host, "pkill", "-x", "sshd")
    yield _rig
    for host in NAMES:
        _rig("kill", host)
    _rig.restore()  # starts them again, with sshd


@pytest.fixture
def secret(rig):
    path = rig.share / "secret"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    yield path
    path.unlink()


class Platform:
    """Starts the same command on every host, each with its own environment."""

    def __init__(self, rig, python):
        self.rig = rig
        self.hvdrun = python.with_name("hvdrun")
        self.started = {}

    def start(self, environ_of, *words, order=range(HOSTS)):
        for number in order:
            environ = [f"{name}={value}" for name, value in environ_of(number).items()]
            command = self.rig.inside(NAMES[number], "env", *environ, self.hvdrun, *words)
            self.started[number] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    def ends(self):
        found = {}
        for number, process in sorted(self.started.items()):
            out, err = process.communicate(timeout=LIMIT_S)
            found[number] = Finished(process.returncode, out, err)
        return [found[number] for number in sorted(found)]

    def until_all_are_up(self, ranks):
        for _ in range(ranks):
            assert self.started[0].stdout.readline().endswith(" up\n")

    def signal(self, number, which):
        """To the hvdrun of that host."""
        name = str(self.hvdrun)
        for host, process in self.rig.members():
            words = process.cmdline()
            if host == NAMES[number] and name in words[:2]:
                process.send_signal(which)
                return
        pytest.fail(f"no hvdrun on {NAMES[number]}")

    def close(self):
        for process in self.started.values():
            end_tree(process)
            process.stdout.close()
            process.stderr.close()


@pytest.fixture
def platform(hosts, rig, python):
    platform = Platform(rig, python)
    yield platform
    platform.close()


def torch_variables(number):
    return {
        "MASTER_ADDR": "server1",
        "MASTER_PORT": PORT,
        "NNODES": HOSTS,
        "NODE_RANK": number,
    }


def tf_config(number):
    cluster = {"chief": [f"server1:{PORT}"], "worker": [f"{n}:{PORT}" for n in NAMES[1:]]}
    task = {"type": "worker", "index": number - 1} if number else {"type": "chief", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def indexed_job(number):
    return {"JOB_COMPLETION_INDEX": number}


PLATFORMS = {
    "MASTER_ADDR and NODE_RANK": (torch_variables, ()),
    "TF_CONFIG": (tf_config, ()),
    "an Indexed Job": (indexed_job, ("--rendezvous", f"server1:{PORT}", "--nodes", str(HOSTS))),
}


@pytest.mark.parametrize(("environ_of", "options"), PLATFORMS.values(), ids=PLATFORMS)
def test_hosts_without_sshd_make_one_job(platform, secret, environ_of, options):
    job = JOB.format(secret=secret.read_text())
    words = ("-np", "6", "--rendezvous-secret-file", secret, *options, "python", "-c", job)
    platform.start(environ_of, *words, order=(2, 0, 1))
    ends = platform.ends()
    assert [end.code for end in ends] == [0] * HOSTS, ends
    lines = sorted(line.partition("] ")[2] for line in ends[0].stdout.splitlines())
    assert lines == sorted(f"{NAMES[r // 2]} {r} 6 111111 []" for r in range(6)), ends[0]


def test_a_parameter_server_of_tf_config_is_a_server(platform, secret):
    def environ_of(number):
        cluster = {"ps": [f"server3:{PORT}"], "worker": [f"server{n}:{PORT}" for n in (1, 2)]}
        task = {"type": "ps", "index": 0} if number == 2 else {"type": "worker", "index": number}
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}

    job = """
import os, torch
import hvdlite as hvd
hvd.init()
print("worker", hvd.rank(), hvd.size(), os.uname().nodename, flush=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.AsyncOptimizer(optimizer, model.named_parameters(), max_staleness=1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
    words = ("-np", "3", "--rendezvous-secret-file", secret, "python", "-c", job)
    platform.start(environ_of, *words)
    ends = platform.ends()
    assert [end.code for end in ends] == [0] * HOSTS, ends
    said = sorted(re.findall(r"worker \d \d server\d", ends[0].stdout))
    assert said == ["worker 0 2 server1", "worker 1 2 server2"], ends[0]


def test_a_failure_is_reported_on_every_host(platform, secret):
    fails = (
        "import os, sys, time\nif os.environ['RANK'] == '2': raise ValueError('the reason')\n"
        "time.sleep(60)"
    )
    words = ("-np", "3", "--rendezvous-secret-file", secret, "python", "-c", fails)
    platform.start(torch_variables, *words)
    for end in platform.ends():
        assert end.code == 1, end
        assert "rank 2 on server3 ended with exit code 1" in end.stderr, end
        assert "ValueError: the reason" in end.stderr, end


WAITS = """
import os, signal, sys, time
print("up", flush=True)
try:
    for _ in range(600): time.sleep(0.1)  # Python handles a signal just before a sleep after it
except KeyboardInterrupt:
    print("interrupted on", os.uname().nodename, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("number", "which", "code"), [(1, signal.SIGINT, 130), (2, signal.SIGTERM, 143)]
)
def test_a_signal_on_any_host_ends_the_job_on_all(platform, secret, number, which, code):
    words = ("-np", "3", "--rendezvous-secret-file", secret, "python", "-c", WAITS)
    platform.start(torch_variables, *words)
    platform.until_all_are_up(3)
    platform.signal(number, which)
    ends = platform.ends()
    assert [end.code for end in ends] == [code] * HOSTS, ends
    if which == signal.SIGINT:
        said = sorted(re.findall("interrupted on (server.)", ends[0].stdout))
        assert said == NAMES


def test_a_platform_that_ends_all_hosts_at_once_gives_the_ranks_their_grace(platform, secret):
    saves = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved on", os.uname().nodename, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
for _ in range(600): time.sleep(0.1)
"""
    words = ("-np", "3", "--rendezvous-secret-file", secret, "python", "-c", saves)
    platform.start(torch_variables, *words)
    platform.until_all_are_up(3)
    for number in (1, 0, 2):
        platform.signal(number, signal.SIGTERM)
    ends = platform.ends()
    assert sorted(re.findall("saved on (server.)", ends[0].stdout)) == NAMES, ends
    assert {end.code for end in ends} == {143}, ends


@pytest.mark.parametrize("number", [0, 1])
def test_an_hvdrun_that_is_killed_ends_the_job_everywhere(platform, secret, number):
    words = ("-np", "3", "--rendezvous-secret-file", secret, "python", "-c", WAITS)
    platform.start(torch_variables, *words)
    platform.until_all_are_up(3)
    platform.signal(number, signal.SIGKILL)
    ends = platform.ends()
    assert {end.code for end in ends} == {72, 137}, ends
    survivors = [end for end in ends if end.code == 72]
    lost = "lost node 0 at server1" if number == 0 else "server2 is lost"
    assert all(lost in end.stderr for end in survivors), ends


@pytest.mark.parametrize("number", [0, 1])
def test_a_host_that_is_cut_off_ends_the_job_after_the_host_timeout(platform, secret, rig, number):
    words = ("-np", "3", "--host-timeout", "3", "--rendezvous-secret-file", secret)
    platform.start(torch_variables, *words, "python", "-c", WAITS)
    platform.until_all_are_up(3)
    rig("cut", NAMES[number])
    ends = platform.ends()
    assert {end.code for end in ends} == {72}, ends
    assert not [w for words in rig.processes().values() for w in words if "-c" in w.split()]


ATTACK = """
import os, socket, time
sockets = []
until = time.monotonic() + 200
sent = 0
while time.monotonic() < until:
    try:
        sock = socket.create_connection(("server1", {port}), 1)
        sock.setblocking(False)
        sock.send(os.urandom((0, 1, 47, 48, 500)[sent % 5]))
        sockets.append(sock)
        sent += 1
        if sent == 100:
            print("up", flush=True)
        if len(sockets) > 800:
            sockets.pop(0).close()
    except OSError:
        time.sleep(0.01)
"""


def test_strangers_neither_join_nor_hold_up_a_job(platform, secret, rig, tmp_path):
    """While hosts meet and while the job runs: connections without end, silent, slow, and with
    guesses, from another host."""
    attack = ATTACK.format(port=PORT)
    options = ("-np", "3", "--rendezvous-secret-file", secret)
    waits = "import time; print('up', flush=True); time.sleep(2)"
    platform.start(torch_variables, *options, "python", "-c", waits, order=(0,))
    attacker = subprocess.Popen(
        rig.inside("server3", platform.hvdrun.with_name("python"), "-c", attack),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert attacker.stdout.readline() == "up\n"
        platform.start(torch_variables, *options, "python", "-c", waits, order=(1, 2))
        ends = platform.ends()
        assert [end.code for end in ends] == [0] * HOSTS, ends
        assert ends[0].stdout.count("up") == 3
        assert attacker.poll() is None, "the attack was over before the job"
    finally:
        end_tree(attacker)
        attacker.stdout.close()


def test_a_host_that_starts_later_is_waited_for(platform, secret, rig):
    words = ("-np", "3", "--rendezvous-secret-file", secret, "true")
    platform.start(torch_variables, *words, order=(1, 2))
    platform.started[1].stderr.readline()  # it says that it waits
    platform.start(torch_variables, *words, order=(0,))
    assert [end.code for end in platform.ends()] == [0] * HOSTS
