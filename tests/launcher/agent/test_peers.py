"""Whom the processes of a job trust on a host: its own user's and root's, and nobody else's."""

import contextlib
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvdrun.agent import peers
from hvdrun.agent.frames import REFUSED
from hvdrun.agent.host_agent import HostAgent
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.machine import socket_users
from hvdrun.machine.environment import LINK
from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.worlds import ROOT

AGENT = (sys.executable, "-I", "-S", str(ROOT / "launcher" / "agent" / "agent.py"))
OTHER_USER = 4242  # needs no entry in /etc/passwd
LIMIT_S = 30.0

# Another user's process with a socket of that name, which listens or only has it.
STRANGER = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
os.setgroups([]), os.setgid({user}), os.setuid({user})
sock.bind(bytes.fromhex(sys.argv[1]))
{listens} and sock.listen(8)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def secret():
    return os.urandom(16).hex()


@contextlib.contextmanager
def stranger(address, listens=True):
    if os.geteuid() != 0:
        lacking("another user's process needs root")
    program = STRANGER.format(user=OTHER_USER, listens=listens)
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program, address.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"up\n"
        yield
        process.stdin.close()


def test_the_name_of_a_socket_differs_by_secret_host_boot_and_user(secret, monkeypatch, tmp_path):
    names = [peers.address(secret), peers.address(secret[::-1])]
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    names.append(peers.address(secret))
    (tmp_path / "boot_id").write_text("another")
    monkeypatch.setattr(peers, "BOOT_ID", str(tmp_path / "boot_id"))
    names.append(peers.address(secret))
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "h2", "", "", "")))
    names.append(peers.address(secret))
    monkeypatch.setattr(peers, "BOOT_ID", str(tmp_path / "none"))
    names.append(peers.address(secret))
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(rb"\0hvdrun-[0-9a-f]{32}", name) for name in names)
    assert names[-1] == peers.address(secret)
    assert not any(secret.encode() in name for name in names)


def forbidden(*_, **__):
    raise ValueError("not available in FIPS mode")


@pytest.mark.parametrize("module", [None, SimpleNamespace(blake2b=forbidden)])
def test_where_blake2_is_forbidden_the_name_comes_of_another_hash(secret, monkeypatch, module):
    usual = peers.address(secret)
    monkeypatch.setitem(sys.modules, "_blake2", module)
    names = [peers.address(secret), peers.address(secret[::-1])]
    assert len({usual, *names}) == 3
    assert all(re.fullmatch(rb"\0hvdrun-[0-9a-f]{32}", name) for name in names)
    assert names[0] == peers.address(secret)


def test_who_listens_is_asked_of_the_kernel(secret):
    message = (
        f"on {os.uname().nodename}, a process of user {OTHER_USER} holds the socket of this"
        " job's supervisor; hvdrun sent nothing to it: ask the administrator of"
        f" {os.uname().nodename} to find it (`ss -xlp`), and start the job again"
    )
    with stranger(peers.address(secret)):
        with pytest.raises(peers.Stranger) as caught:
            peers.connect(secret)
        assert str(caught.value) == message
        with pytest.raises(peers.Stranger) as caught:
            peers.listen(secret)
        assert str(caught.value) == message


@pytest.mark.parametrize(("user", "trusted"), [(0, True), (7, True), (8, False), (65534, False)])
def test_root_and_the_same_user_are_trusted(monkeypatch, user, trusted):
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setattr(socket_users, "_peer", lambda _: (1, user))
    assert peers.is_trusted(None) == trusted


UNMAPPED = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from hvdrun.machine.socket_users import is_trusted, user_of
ours, theirs = socket.socketpair()
sock = socket.socket(fileno=int(sys.argv[2]))
print(os.geteuid(), user_of(sock), is_trusted(sock), user_of(ours), is_trusted(ours))
"""


def test_in_a_user_namespace_a_stranger_with_the_same_number_is_not_trusted(secret):
    """There all users without a number have one number, also the user of this process."""
    if os.geteuid():
        lacking("only root can start a process of another user")
    in_namespace = [shutil.which("unshare"), "--user", sys.executable, "-c", UNMAPPED]
    with stranger(peers.address(secret)), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(peers.address(secret))
        done = subprocess.run(
            [*in_namespace, os.pathsep.join(sys.path), str(sock.fileno())],
            pass_fds=[sock.fileno()],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.stdout.split() == ["65534", "65534", "False", "65534", "True"], done


def test_a_name_that_somebody_has_and_does_not_answer_by_is_an_error(secret, monkeypatch):
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    with stranger(peers.address(secret), listens=False):
        assert peers.connect(secret) is None
        with pytest.raises(peers.Stranger, match="a process that does not answer holds"):
            peers.listen(secret)


@contextlib.contextmanager
def crowd(address):
    """Fills the queue of the socket of that name with connections, and tries some more."""
    with contextlib.ExitStack() as stack:
        while True:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            try:
                sock.connect(address)
            except BlockingIOError:
                break
        yield


def test_a_socket_whose_queue_stays_full_is_not_waited_for_without_end(secret, monkeypatch):
    monkeypatch.setattr(peers, "QUEUE_S", 1)
    address = peers.address(secret)
    with stranger(address), crowd(address):
        for way in (peers.connect, peers.listen):
            with pytest.raises(peers.Stranger, match="a process that does not answer holds"):
                way(secret)


def test_a_connection_waits_for_a_supervisor_that_reads_late(secret, monkeypatch):
    monkeypatch.setattr(peers, "QUEUE_S", 1)
    listener = peers.listen(secret)
    with contextlib.closing(peers.connect(secret)) as sock:
        limits = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, peers.TIME.size)
    assert peers.TIME.unpack(limits) == (0, 0)
    os.close(listener)


def test_where_a_process_of_the_job_listens_already_a_second_one_leaves_it_to_that(secret):
    first = peers.listen(secret)
    assert peers.listen(secret) is None
    os.close(first)
    second = peers.listen(secret)
    assert second is not None
    os.close(second)


def agent(*words, secret, **environment):
    return subprocess.run(
        [*AGENT, *words],
        env={**os.environ, LINK: secret, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("patience", [{}, {"HVDRUN_PATIENCE": "20"}], ids=["mpirun", "srun"])
def test_a_rank_says_nothing_to_another_user_and_does_not_start(secret, patience):
    with stranger(peers.address(secret)):
        done = agent("rank", "echo", "ran", secret=secret, **patience)
    assert (done.returncode, done.stdout) == (1, "")
    host = os.uname().nodename
    said = f"hvdrun: rank 0 was not started: on {host}, a process of user {OTHER_USER} holds"
    assert done.stderr.startswith(said), done


@pytest.mark.parametrize("patience", [{}, {"HVDRUN_PATIENCE": "0.1"}], ids=["mpirun", "srun"])
def test_a_rank_whose_supervisor_is_gone_does_not_start(secret, patience):
    done = agent("rank", "echo", "ran", secret=secret, **patience)
    assert (done.returncode, done.stdout) == (1, "")
    host = os.uname().nodename
    said = f"hvdrun: rank 0 was not started: neither hvdrun nor its agent runs on {host}"
    assert done.stderr.startswith(said), done


def test_a_rank_that_was_given_no_supervisor_runs_without():
    done = agent("rank", "echo", "ran", secret="")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done


@pytest.mark.parametrize("is_taken", [False, True])
def test_no_host_is_connected_to_for_an_hvdrun_that_is_gone(secret, tmp_path, is_taken):
    (tmp_path / "ssh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "ssh").chmod(0o755)
    with stranger(peers.address(secret)) if is_taken else contextlib.nullcontext():
        done = agent("ssh", "h2", "orted", secret=secret, PATH=f"{tmp_path}:/bin")
    assert (done.returncode, done.stdout) == (255, "")
    why = f"on {os.uname().nodename}, a process of user" if is_taken else "hvdrun has ended\n"
    assert done.stderr.startswith(f"hvdrun: no connection to h2 was made: {why}"), done


def test_a_host_agent_says_that_another_user_has_its_name_and_starts_nothing(secret, monkeypatch):
    said = []
    with stranger(peers.address(secret)), selectors.DefaultSelector() as selector:
        monkeypatch.setattr(HostAgent, "_send", lambda _, *words: said.append(words))
        host_agent = HostAgent()
        host_agent.selector = selector
        host_agent._set_up(f"{secret}\0{30}\0sh\0echo started".encode())
    [(kind, _, text)] = said
    assert kind == REFUSED
    assert f"a process of user {OTHER_USER} holds".encode() in text
    assert (host_agent.daemon, host_agent.local_ranks, host_agent.status) == (0, None, 1)


@pytest.mark.parametrize(("user", "heard"), [(OTHER_USER, False), (0, True)])
def test_another_user_that_connects_to_a_supervisor_is_not_heard(secret, monkeypatch, user, heard):
    monkeypatch.setattr(socket_users, "_peer", lambda _: (1, user))
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as sock:
        local_ranks = LocalRanks(peers.listen(secret), selector, lambda *_: None, lambda: os.dup(0))
        sock.connect(peers.address(secret))
        [(key, _)] = selector.select(LIMIT_S)
        key.data()
        assert len(local_ranks.keepers) == heard
        sock.settimeout(LIMIT_S)
        if not heard:
            assert sock.recv(1) == b""
        for keeper in local_ranks.keepers:
            keeper.sock.close()
        local_ranks.listener.close()


@pytest.fixture
def in_place_of_ssh(tmp_path, monkeypatch):
    """in_place_of_ssh(text): a script in ssh's place. $command is what to do on the host."""

    def make(text):
        (tmp_path / "ssh").write_text(f"#!/bin/sh\nfor word; do command=$word; done\n{text}\n")
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


# A host agent that answers preflight, and refuses to start a job.
REFUSES = """
import os, subprocess, sys
from hvdrun.agent.frames import *
agent = subprocess.Popen(["sh", "-c", sys.argv[1]], stdin=subprocess.PIPE)
buffer = bytearray()
while data := os.read(0, CHUNK):
    buffer = bytearray((buffer + data).lstrip(b"\\n"))
    for kind, rank, payload in unpack(buffer):
        if kind == START:
            write_all(1, frame(REFUSED, payload=sys.argv[2].encode()) + frame(BYE, payload=b"1"))
            agent.kill()
            sys.exit(1)
        agent.stdin.write(frame(kind, rank, payload))
        agent.stdin.flush()
"""


def test_a_host_whose_name_another_user_has_ends_the_job_with_the_reason(
    python, tmp_path, in_place_of_ssh
):
    said = "on h2, a process of user 4242 holds it"
    (tmp_path / "refuses").write_text(REFUSES)
    in_place_of_ssh(f"exec {python} {tmp_path}/refuses \"$command\" '{said}'")
    done = run_program([python, "-m", "hvdrun", "-H", "h2:1", "echo", "ran"], LIMIT_S)
    assert (done.code, done.stdout) == (71, ""), done
    assert f"hvdrun: h2 can't run ranks: {said}\n" in done.stderr, done


@pytest.mark.wide_in("mpich")
def test_where_another_host_turns_out_to_be_this_machine_the_ranks_find_hvdrun(
    python, in_place_of_ssh
):
    in_place_of_ssh('exec sh -c "$command"')
    command = [python, "-m", "hvdrun", "-H", "h2:2", "sh", "-c", "echo ran $RANK"]
    done = run_program(command, LIMIT_S)
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] ran 0", "[1] ran 1"], done
