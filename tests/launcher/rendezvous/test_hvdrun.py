"""hvdrun on two nodes that are this machine, over loopback: for real, under both MPIs."""

import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from hvdrun.job.course import ONE_ACT_S
from tests.harness.programs import Finished
from tests.harness.worlds import end_tree, python_of
from tests.launcher.rendezvous.loops import free_port

LIMIT_S = 60.0
JOB = """
import os
from mpi4py import MPI
secrets = [name for name in os.environ if "SECRET" in name or name == "HVDRUN_NODES"]
print("rank", MPI.COMM_WORLD.rank, "of", MPI.COMM_WORLD.size, secrets, flush=True)
"""
WAITS = "import time\nprint('up', flush=True)\ntime.sleep(60)"


@pytest.fixture
def port():
    return str(free_port())


class Nodes:
    """The hvdruns of one job."""

    def __init__(self, python, port):
        self.python = python
        self.place = ("--rendezvous", f"127.0.0.1:{port}")
        self.running = []

    def start(self, *options, environ=None, place=None, program=None, before=()):
        self.running.append(
            subprocess.Popen(
                [
                    *before,
                    *(program or [self.python.with_name("hvdrun")]),
                    *(self.place if place is None else place),
                    *options,
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return self.running[-1]

    def ends(self):
        """How they have ended, in the order of their start."""
        found = []
        for process in self.running:
            out, err = process.communicate(timeout=LIMIT_S)
            found.append(Finished(process.returncode, out, err))
        return found

    def close(self):
        for process in self.running:
            end_tree(process)
            process.stdout.close()
            process.stderr.close()


@pytest.fixture
def nodes(python, port):
    nodes = Nodes(python, port)
    yield nodes
    nodes.close()


@pytest.fixture
def openmpi_nodes(port):
    nodes = Nodes(python_of("openmpi"), port)
    yield nodes
    nodes.close()


def test_one_command_on_each_node_makes_one_job(nodes):
    secret = {"HVDLITE_RENDEZVOUS_SECRET": secrets.token_hex(32)}
    for number in (1, 0):
        nodes.start(
            *("-np", "4", "--nodes", "2", "--node-rank", str(number), "python", "-c", JOB),
            environ=secret,
        )
    other, first = nodes.ends()
    assert (first.code, other.code) == (0, 0), (first, other)
    lines = sorted(line.partition("] ")[2] for line in first.stdout.splitlines())
    assert lines == [f"rank {n} of 4 []" for n in range(4)]
    assert other.stdout == ""
    assert "this is node 1 of 2" in other.stderr


def test_node_0_alone_writes_the_report_of_the_whole_job(openmpi_nodes, tmp_path):
    for number in (1, 0):
        openmpi_nodes.start(
            *("-np", "4", "--nodes", "2", "--node-rank", str(number)),
            *("--report-file", f"{tmp_path}/{number}.json", "sh", "-c", "exit $((RANK / 3))"),
        )
    other, first = openmpi_nodes.ends()
    assert (first.code, other.code) == (1, 1), (first, other)
    assert os.listdir(tmp_path) == ["0.json"]
    found = json.loads((tmp_path / "0.json").read_text())
    assert (found["exit_code"], found["failure"]["rank"]) == (1, 3)
    assert [rank for host in found["hosts"] for rank in host["ranks"]] == [0, 1, 2, 3]


# Root on a machine can read every process; in a container it lacks these capabilities: SYS_PTRACE,
# SYS_ADMIN and PERFMON.
AS_IN_A_CONTAINER = """
import ctypes, os, sys
pr_capbset_drop = 24
for capability in (19, 21, 38):
    ctypes.CDLL(None).prctl(pr_capbset_drop, capability, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
LOOKS = """
import contextlib, glob, hashlib, sys
for path in glob.glob("/proc/[0-9]*/environ"):
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for word in file.read().split(b"\\0"):
            if hashlib.sha256(word.partition(b"=")[2]).hexdigest() == sys.argv[1]:
                print("found in", path, flush=True)
print("looked", flush=True)
"""


def test_ranks_can_not_read_the_secret_from_a_nodes_hvdrun(openmpi_nodes):
    secret = secrets.token_hex(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    for number in (0, 1):
        openmpi_nodes.start(
            *("-np", "2", "--nodes", "2", "--node-rank", str(number)),
            *("python", "-c", LOOKS, digest),
            environ={"HVDLITE_RENDEZVOUS_SECRET": secret},
            before=(sys.executable, "-c", AS_IN_A_CONTAINER),
        )
    first, other = openmpi_nodes.ends()
    assert (first.code, other.code) == (0, 0), (first, other)
    assert first.stdout.count("looked") == 2, first
    assert "found" not in first.stdout


def test_the_first_failure_is_reported_on_every_node_with_its_exit_code(openmpi_nodes):
    fails = "import os, sys\nif os.environ['RANK'] == '1': sys.exit('the reason')\nelse:"
    fails += " import time; time.sleep(60)"
    for number in (0, 1):
        openmpi_nodes.start(
            *("-np", "2", "--nodes", "2", "--node-rank", str(number), "python", "-c", fails)
        )
    first, other = openmpi_nodes.ends()
    assert (first.code, other.code) == (1, 1), (first, other)
    assert "the reason" in first.stderr
    for end in (first, other):
        assert "rank 1 on localhost ended with exit code 1" in end.stderr, end
    assert "the reason" in other.stderr


def test_a_signal_to_any_node_ends_the_job_on_all(openmpi_nodes):
    first, other = (
        openmpi_nodes.start(
            *("-np", "2", "--nodes", "2", "--node-rank", str(number), "python", "-c", WAITS)
        )
        for number in (0, 1)
    )
    for _ in range(2):
        assert first.stdout.readline().endswith("up\n")
    other.send_signal(signal.SIGTERM)
    ends = openmpi_nodes.ends()
    assert [end.code for end in ends] == [143, 143], ends
    assert all("SIGTERM: the 2 ranks have 20 s to end" in end.stderr for end in ends)


SAVES = """
import signal, time
def go_on(*_):
    global told
    told = True
told = False
signal.signal(signal.SIGUSR1, go_on)
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    while not told:
        time.sleep(0.01)
    print("saved", flush=True)
"""


def test_a_signal_to_each_node_leaves_the_ranks_their_time(openmpi_nodes):
    options = ("-np", "2", "--nodes", "2", "--grace-period", "30", "--node-rank")
    first, other = (
        openmpi_nodes.start(*options, str(number), "python", "-c", SAVES) for number in (0, 1)
    )
    for _ in range(2):
        assert first.stdout.readline().endswith("up\n")
    other.send_signal(signal.SIGINT)
    while "Ctrl-C: the 2 ranks have 30 s to end" not in (line := other.stderr.readline()):
        assert line
    time.sleep(2 * ONE_ACT_S)
    first.send_signal(signal.SIGINT)
    first.send_signal(signal.SIGUSR1)
    ends = openmpi_nodes.ends()
    assert [end.code for end in ends] == [130, 130], ends
    assert ends[0].stdout.count("saved") == 2, ends
    assert not any("killing" in end.stderr for end in ends), ends


def test_under_nohup_the_end_of_a_nodes_terminal_is_not_the_jobs(openmpi_nodes):
    first, other = (
        openmpi_nodes.start(
            *("-np", "2", "--nodes", "2", "--node-rank", str(number), "python", "-c", WAITS),
            before=("nohup",) * number,
        )
        for number in (0, 1)
    )
    for _ in range(2):
        assert first.stdout.readline().endswith("up\n")
    other.send_signal(signal.SIGHUP)
    other.send_signal(signal.SIGUSR1)
    while "SIGUSR1 was sent to 0 of 2 ranks" not in (line := other.stderr.readline()):
        assert line
    other.send_signal(signal.SIGTERM)
    ends = openmpi_nodes.ends()
    assert [end.code for end in ends] == [143, 143], ends


def test_a_node_whose_messages_nobody_reads_is_not_lost(openmpi_nodes):
    for number in (1, 0):
        process = openmpi_nodes.start(
            *("-np", "2", "--nodes", "2", "--node-rank", str(number), "echo", "up")
        )
        if number:
            process.stderr.close()
            process.stderr = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    other, first = openmpi_nodes.ends()
    assert (first.code, other.code) == (0, 0), (first, other)
    assert first.stdout.count("up") == 2


LACKS = """
import sys
from hvdrun.command_line import cli
def launch(*_, **__):
    raise {}
cli.launch = launch
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        ("OSError(24, 'Too many open files')", 76, "hvdrun can't open any more files"),
        ("MemoryError", 76, "hvdrun gets no more memory"),
        ("RuntimeError('what nobody expects')", 1, "what nobody expects"),
    ],
)
def test_what_node_0_lacks_is_the_end_and_the_exit_code_of_all(openmpi_nodes, error, code, says):
    options = ("-np", "2", "--nodes", "2", "--node-rank")
    openmpi_nodes.start(*options, "1", "true")
    program = openmpi_nodes.python, "-c", LACKS.format(error)
    openmpi_nodes.start(*options, "0", "true", program=program)
    other, first = openmpi_nodes.ends()
    assert (first.code, other.code) == (code, code), (first, other)
    assert f"hvdrun: node 0 has failed: {says}" in other.stderr
    assert says in first.stderr


WRONG = {
    "another number of processes": (
        ("-np", "4", "--nodes", "2", "--node-rank", "1"),
        (71, 71),
        r"has -np 4, and node 0 .* has 2",
    ),
    "another number of nodes": (
        ("-np", "2", "--nodes", "3", "--node-rank", "1"),
        (71, 71),
        r"has --nodes 3, and node 0 .* has 2",
    ),
}


@pytest.mark.parametrize(("options", "codes", "says"), WRONG.values(), ids=WRONG)
def test_nodes_that_do_not_fit_say_so_on_both(openmpi_nodes, options, codes, says):
    openmpi_nodes.start("-np", "2", "--nodes", "2", "--node-rank", "0", "true")
    openmpi_nodes.start(*options, "true")
    ends = openmpi_nodes.ends()
    assert tuple(end.code for end in ends) == codes, ends
    for end in ends:
        assert re.search(says, end.stderr), end


def test_two_nodes_with_one_number_say_so_on_all(openmpi_nodes):
    for number in (0, 1, 1):
        openmpi_nodes.start("-np", "3", "--nodes", "3", "--node-rank", str(number), "true")
    ends = openmpi_nodes.ends()
    assert all(end.code for end in ends), ends
    assert "say that they are node 1" in ends[0].stderr, ends


@pytest.mark.parametrize(
    ("to", "number"),
    [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGHUP), (0, signal.SIGQUIT)],
)
def test_a_signal_before_the_start_ends_all_nodes_with_its_code(openmpi_nodes, to, number):
    first, other = (
        openmpi_nodes.start("-np", "3", "--nodes", "3", "--node-rank", str(number), "true")
        for number in (0, 1)
    )
    assert "this is node 1 of 3" in other.stderr.readline()
    (first, other)[to].send_signal(number)
    ends = openmpi_nodes.ends()
    assert [end.code for end in ends] == [128 + number] * 2, ends
    assert "before a rank had been started" in ends[1].stderr, ends


def test_a_node_that_starts_anew_before_the_job_does_is_taken_back(openmpi_nodes):
    options = ("-np", "3", "--nodes", "3", "--node-rank")
    openmpi_nodes.start(*options, "0", "true")
    lost = openmpi_nodes.start(*options, "1", "true")
    assert "this is node 1 of 3" in lost.stderr.readline()
    lost.kill()
    for number in (1, 2):
        openmpi_nodes.start(*options, str(number), "true")
    ends = openmpi_nodes.ends()
    assert [end.code for end in ends] == [0, -signal.SIGKILL, 0, 0], ends


def test_a_node_that_does_not_come_is_named_after_the_start_timeout(openmpi_nodes):
    options = ("-np", "3", "--nodes", "3", "--start-timeout", "2")
    for number in (0, 1):
        openmpi_nodes.start(*options, "--node-rank", str(number), "true")
    ends = openmpi_nodes.ends()
    assert [end.code for end in ends] == [75, 75], ends
    for end in ends:
        assert "node 2 of 3 did not connect to 127.0.0.1:" in end.stderr, end
        assert "within 2 s" in end.stderr, end
        assert "; 127.0.0.1 is each host itself: other hosts need node 0's name" in end.stderr


def test_without_node_0_the_others_say_where_they_have_looked(openmpi_nodes):
    options = ("-np", "2", "--nodes", "2", "--node-rank", "1", "--start-timeout", "1")
    openmpi_nodes.start(*options, "true")
    (end,) = openmpi_nodes.ends()
    assert end.code == 75
    assert "node 1 found no node 0 at 127.0.0.1:" in end.stderr
    assert "Connection refused" in end.stderr
    assert "; 127.0.0.1 is each host itself: other hosts need node 0's name" in end.stderr


def test_a_node_with_another_secret_runs_nothing_and_both_sides_say_it(openmpi_nodes, tmp_path):
    touch = ("touch", str(tmp_path / "file"))
    for number, secret in ((0, "a" * 32), (1, "b" * 32)):
        openmpi_nodes.start(
            *("-np", "2", "--nodes", "2", "--node-rank", str(number), "--start-timeout", "2"),
            *touch,
            environ={"HVDLITE_RENDEZVOUS_SECRET": secret},
        )
    first, other = openmpi_nodes.ends()
    assert (first.code, other.code) == (75, 75)
    assert "127.0.0.1 connected and did not prove the secret" in first.stderr, first
    assert "; the secret must be the same on both hosts; " in other.stderr, other
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("options", "environ", "code", "says"),
    [
        (("--rendezvous", "server1:5"), {}, 64, "of how many hosts"),
        (
            ("--rendezvous", "server1:5", "--nodes", "2", "--node-rank", "0"),
            {},
            64,
            "openssl rand -hex 32",
        ),
        (("--rendezvous", "server1:5", "-H", "a,b"), {}, 64, "two ways to start"),
        (("-H", "localhost", "--node-rank", "0"), {}, 64, "--node-rank is for hosts that each"),
        (("-H", "localhost", "--nodes", "1"), {}, 64, "--nodes is for hosts that each start"),
        (
            ("--hostfile", "/dev/null", "--rendezvous-secret-file", "x"),
            {},
            64,
            "--rendezvous-secret-file is for hosts that each start hvdrun, and with --hostfile",
        ),
        (("--nodes", "2"), {}, 64, "needs --rendezvous"),
        ((), {"NNODES": "2"}, 64, "MASTER_ADDR and NODE_RANK are not set"),
        ((), {"TF_CONFIG": "{"}, 64, "TF_CONFIG is not JSON"),
        (
            ("--rendezvous", "127.0.0.1:5", "--nodes", "2", "--node-rank", "0"),
            {"HVDLITE_RENDEZVOUS_SECRET": "short"},
            64,
            "has 5 characters",
        ),
    ],
)
def test_a_wrong_command_says_what_to_change(openmpi_nodes, options, environ, code, says):
    openmpi_nodes.start(*options, "-np", "2", "true", environ=environ, place=())
    (end,) = openmpi_nodes.ends()
    assert end.code == code, end
    assert says in end.stderr, end


def test_hosts_that_are_named_count_more_than_what_a_platform_sets(openmpi_nodes):
    torch = {"MASTER_ADDR": "nowhere", "NNODES": "2", "NODE_RANK": "1"}
    torch |= {"HVDLITE_RENDEZVOUS_SECRET": "x" * 32}
    shows = "echo $WORLD_SIZE $NODE_RANK ${HVDLITE_RENDEZVOUS_SECRET-none}"
    command = ("-np", "2", "-H", "localhost:2", "sh", "-c", shows)
    openmpi_nodes.start(*command, environ=torch, place=())
    (end,) = openmpi_nodes.ends()
    assert end.code == 0, end
    assert end.stdout.count("2 1 none") == 2


def test_a_dry_run_waits_for_nobody(openmpi_nodes):
    options = ("-np", "4", "--nodes", "2", "--node-rank", "0", "--dry-run")
    openmpi_nodes.start(*options, "true")
    (end,) = openmpi_nodes.ends()
    assert end.code == 0, end
    assert "localhost:2,hvdrun-host-1:2" in end.stdout, end


def test_nodes_that_are_one_machine_run_their_ranks_there(openmpi_nodes):
    """Two terminals, to try it."""
    job = textwrap.dedent(JOB)
    for number in (0, 1):
        openmpi_nodes.start(
            *("-np", "3", "--nodes", "2", "--node-rank", str(number), "python", "-c", job)
        )
    first, other = openmpi_nodes.ends()
    assert (first.code, other.code) == (0, 0), (first, other)
    assert first.stdout.count("of 3") == 3
