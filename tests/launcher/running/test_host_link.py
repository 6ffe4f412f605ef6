"""hvdrun's end of a connection to another host."""

import contextlib
import os
import resource
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdrun.agent.frames import (
    BYE,
    END,
    EXIT,
    GAVE_UP,
    HEADER,
    HELLO,
    OUT,
    PING,
    PING_EVERY_S,
    REFUSED,
    START,
    VARIABLES,
    frame,
    unpack,
)
from hvdrun.agent.host_connection import LINE_EVERY_S, HostConnection
from hvdrun.agent.peers import listen
from hvdrun.agent.silence import clock
from hvdrun.agent.ssh import split_ssh
from hvdrun.job.events import HostGaveUp, HostTalks, SshSaid
from hvdrun.machine.environment import LINK, pack
from hvdrun.running.host_link import HostLink
from tests.harness.needs import lacking
from tests.harness.worlds import ROOT, end_tree

SECRET_OF_JOB = "0123456789abcdef"
WISH = (b"server9", b"", b"sh", b"orted -x")
START_OF_JOB = b"\0".join((SECRET_OF_JOB.encode(), b"30", b"sh", b"orted -x"))


def start(daemon, secret=SECRET_OF_JOB, limit_s=30, shell="sh"):
    """The frame with which hvdrun starts a job on a host."""
    return frame(START, payload=f"{secret}\0{limit_s}\0{shell}\0{daemon}".encode())


@pytest.mark.parametrize("last_first", [False, True])
def test_a_connection_that_ends_with_words_on_stderr_may_be_closed_before_they_are_read(last_first):
    """Both are ready at once, and what is read first closes the other."""
    selector = selectors.DefaultSelector()
    near, far = socket.socketpair()
    reader, writer = os.pipe()
    closed, told = [], []
    asked, role = socket.socketpair()
    connection = HostConnection(near, reader, None, selector)
    calls = (lambda *_: None, told.append, lambda _: None, closed.append)
    link = HostLink(asked, WISH, connection, {}, SECRET_OF_JOB, selector, *calls)
    os.write(writer, b"Connection refused\n")
    os.close(writer)
    far.close()
    ready = sorted(selector.select(1.0), key=lambda event: event[0].fd == reader)
    assert len(ready) == 2
    for key, _ in reversed(ready) if last_first else ready:
        key.data()
    assert closed == [link]
    assert told == [SshSaid("server9", b"Connection refused\n")]
    assert given(role) == [(BYE, b"255")]
    role.close()
    selector.close()


@contextlib.contextmanager
def link_to_a_host():
    """hvdrun's end, its selector, and the host's end."""
    with link_and_role() as (link, selector, far, _, _):
        yield link, selector, far


@contextlib.contextmanager
def link_and_role(said=b"", variables=None):
    """Also the end of the role ssh, and what the link tells. said: by the host before."""
    reader, writer = os.pipe()
    near, far = socket.socketpair()
    asked, role = socket.socketpair()
    told = []
    far.settimeout(1.0)
    with selectors.DefaultSelector() as selector, far, role:
        nobody = SimpleNamespace(on_hello=lambda: None, on_data=lambda: None)
        connection = HostConnection(near, reader, nobody, selector)
        if said:
            far.send(said)
            read_what_is_there(selector)
        calls = (lambda *_: None, told.append, lambda _: None, told.append)
        job = (WISH, connection, {}, SECRET_OF_JOB, selector)
        link = HostLink(asked, *job, *calls, variables=variables)
        link.begin()
        yield link, selector, far, role, told
        link.close()
    os.close(writer)


def given(far):
    """The frames that one has been sent."""
    return [(kind, payload) for kind, _, payload in unpack(bytearray(far.recv(1 << 16)))]


def read_what_is_there(selector):
    for key, _ in selector.select(1.0):
        key.data()


def test_a_host_that_comes_up_while_nothing_is_read_gets_signs_of_life():
    """Else its agent would take hvdrun for dead."""
    with link_to_a_host() as (link, selector, far):
        link.pause(True)
        far.send(HELLO + frame(PING, payload=b"0"))
        read_what_is_there(selector)
        link.pause(True)
        assert link.tick(clock() + PING_EVERY_S)
        said = [kind for kind, *_ in unpack(bytearray(far.recv(100)))]
        assert said == [START, PING]
        far.send(frame(PING, payload=b"0"))
        assert not selector.select(0)  # from now on its messages wait unread


@pytest.mark.parametrize(
    "message",
    [
        HEADER.pack(OUT, 0, 1 << 30),
        frame(OUT, 1 << 24, b"x"),
        frame(EXIT, 0, b"code 3"),
        frame(PING, payload=b""),
        frame(BYE, payload=b"-"),
        frame(GAVE_UP, payload=b"nan 5"),
    ],
)
def test_a_host_that_sends_nonsense_is_hung_up_on(message):
    closed = []
    with link_to_a_host() as (link, selector, far):
        link.on_close = closed.append
        far.send(HELLO + message)
        read_what_is_there(selector)
        assert link.how_it_ended().nonsense
        assert link.closed
        assert closed == [link]


def test_a_host_that_ends_with_a_grace_can_be_told_that_there_is_none():
    with link_to_a_host() as (link, selector, far):
        far.send(HELLO)
        read_what_is_there(selector)
        link.end(3.0)
        link.end(0)
        with far.makefile("rb") as heard:
            frames = unpack(bytearray(heard.read()))
        expected = [(START, START_OF_JOB), (END, b"15 3000"), (END, b"15 0")]
        assert [(kind, payload) for kind, _, payload in frames] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a", "orted", "-x", "b"], ([], "a", ["orted", "-x", "b"])),
        (["-x", "a", "orted"], (["-x"], "a", ["orted"])),
        # As the MPI operator of Kubernetes has it set for Open MPI.
        (["-o", "ConnectionAttempts=10", "a"], (["-o", "ConnectionAttempts=10"], "a", [])),
        (["-oPort=3", "-p", "22", "a", "b"], (["-oPort=3", "-p", "22"], "a", ["b"])),
    ],
)
def test_options_that_mpi_gives_to_ssh_come_before_the_host(arguments, expected):
    assert split_ssh(arguments) == expected


AGENT = (sys.executable, "-I", "-S", str(ROOT / "launcher" / "agent" / "agent.py"))


def test_a_schedulers_program_stands_in_sshs_place_with_the_host_in_its_words():
    environ = {
        **os.environ,
        "HVDRUN_REACH": shlex.join(
            [sys.executable, "-c", "import sys; print(sys.argv)", "-w={host}"]
        ),
        "SHELL": "/bin/sh",
    }
    done = subprocess.run(
        [*AGENT, "ssh", "-x", "n7", "orted", "-a", "b c"],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{['-c', '-w=n7', '/bin/sh', '-c', 'orted -a b c']}\n", done.stderr


def host_agent(secret, daemon, prepare=None, variables=None, limit_s=30):
    process = subprocess.Popen(
        [*AGENT, "host"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        preexec_fn=prepare,
    )
    if variables is not None:
        process.stdin.write(frame(VARIABLES, payload=pack(variables)))
    process.stdin.write(start(daemon, secret, limit_s))
    return process


def frames_of(process):
    """Kind and payload of each, as they come."""
    buffer, begun = bytearray(), False
    while data := process.stdout.read(1 << 16):
        buffer += data
        if not begun and HELLO in buffer:
            del buffer[: buffer.index(HELLO) + len(HELLO)]
            begun = True
        if begun:
            for kind, _, payload in unpack(buffer):
                yield kind, payload


def test_hvdrun_sends_empty_lines_until_the_host_agent_talks():
    """Start-up files of the login shell that read one would wait for ever."""
    with link_to_a_host() as (link, selector, far):
        now = time.monotonic()
        for at in (now, now + 0.5 * LINE_EVERY_S, now + 1.5 * LINE_EVERY_S):
            assert link.tick(at)
        assert far.recv(100) == b"\n\n"
        far.send(b"a prompt" + HELLO)
        read_what_is_there(selector)
        assert link.tick(now + 3 * LINE_EVERY_S)
        assert b"\n" not in far.recv(100)[:1]


def test_the_printed_words_of_a_login_that_is_no_agent_are_kept():
    with link_to_a_host() as (link, selector, far):
        far.send(b"This account is currently not available.\n")
        read_what_is_there(selector)
        assert b"not available" in link.how_it_ended().daemon_said


@pytest.mark.parametrize("shell", ["sh", "csh"])
def test_mpis_daemon_is_started_by_the_shell_that_mpi_wrote_for(shell):
    if shell == "csh" and not shutil.which("tcsh"):
        lacking("this test needs tcsh: apt-get install tcsh")
    command = {"sh": "A='3 4'; exit ${A%% *}", "csh": "setenv A 3; exit $A"}[shell]
    process = subprocess.Popen(
        [*AGENT, "host"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    try:
        # The empty lines were for start-up files.
        process.stdin.write(b"\n\n" + start(command, f"test-{os.getpid()}", shell=shell))
        assert dict(frames_of(process))[BYE] == b"3"
    finally:
        end_tree(process)
        process.stdin.close()
        process.stdout.close()


# With a file in shared memory, as MPIs have it and leave it.
SAVES_WHEN_IT_IS_TO_END = """
import mmap, signal, time
asked = []
def save(*_):
    asked.append(1)
    with open({saved!r}, "a") as file:
        file.write("TERM\\n")
    print("saving", flush=True)
signal.signal(signal.SIGTERM, save)
with open({shared!r}, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print("up", flush=True)
while not asked:
    time.sleep(0.05)
time.sleep(0.4)
"""


def test_ranks_have_their_time_to_end_also_where_mpi_talks_when_hvdrun_is_gone(tmp_path):
    """Its daemon reports that it has lost mpirun, but no process reads the report."""
    secret = f"test-{os.getpid()}"
    saved = tmp_path / "saved"
    shared = Path(f"/dev/shm/vader_segment.{secret}")
    program = SAVES_WHEN_IT_IS_TO_END.format(shared=str(shared), saved=str(saved))
    rank = shlex.join(["env", f"{LINK}={secret}", *AGENT, "rank", sys.executable, "-c", program])
    process = host_agent(secret, f"{rank} & while echo lost; do sleep 0.01; done")
    try:
        said = b""
        for kind, payload in frames_of(process):
            process.stdin.write(frame(PING))
            said += payload if kind == OUT else b""
            if b"up\n" in said:
                break
        process.stdout.close()
        process.stdin.close()
        process.wait(30)
        assert saved.read_text() == "TERM\n"  # and not once more while it is at it
        assert not shared.exists()
    finally:
        end_tree(process)
        shared.unlink(missing_ok=True)


MANY = {f"V{number}": "x" * 60_000 for number in range(10)}  # more than a socket holds


def test_the_ranks_of_a_host_get_the_jobs_variables_from_its_agent(tmp_path):
    """And those of the host from the host, and those that MPI has set for it from MPI."""
    secret = f"test-{os.getpid()}"
    names = ("KEY", "HOME", "OMPI_MCA_x", "LANG")
    shown = f"import os; print([os.environ.get(n) for n in {names}], len(os.environ['V9']))"
    sent = {"KEY": "x\ny", **MANY, "LANG": "C", "OMPI_MCA_x": "user's", "HVDRUN_EXPORTED": "LANG"}
    settings = ["env", f"{LINK}={secret}", "OMPI_MCA_x=mpi's", "HOME=/of/the/host", "LANG=other"]
    rank = shlex.join([*settings, *AGENT, "rank", sys.executable, "-c", shown])
    process = host_agent(secret, rank, variables=sent)
    try:
        said = b"".join(payload for kind, payload in frames_of(process) if kind == OUT)
    finally:
        end_tree(process)
        process.stdin.close()
        process.stdout.close()
    expected = [sent["KEY"], os.environ["HOME"], "mpi's", "C"]
    assert said.decode() == f"{expected} 60000\n"


def test_a_rank_whose_supervisor_ends_before_it_has_its_variables_says_so(tmp_path):
    secret = f"test-{os.getpid()}"
    listener = socket.socket(fileno=listen(secret))
    process = subprocess.Popen(
        [*AGENT, "rank", "true"],
        env={**os.environ, LINK: secret, "PMI_RANK": "3"},
        stderr=subprocess.PIPE,
    )
    with listener, listener.accept()[0] as sock:
        assert sock.recv(100)
    said = process.communicate(timeout=30)[1]
    assert b"rank 3 was not started: hvdrun, or its agent on " in said
    assert process.returncode == 1


def test_a_host_agent_hears_that_it_is_to_end_while_nobody_reads_what_it_says():
    """hvdrun's own reader has stopped reading, but hvdrun runs."""
    process = host_agent(SECRET_OF_JOB, "exec yes")
    try:
        assert next(frames_of(process))
        time.sleep(1.0)  # by then the pipe is full
        process.stdin.write(frame(END, payload=b"15 0"))
        deadline = time.monotonic() + 30.0
        while process.poll() is None:
            assert time.monotonic() < deadline
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(frame(PING))
            time.sleep(0.2)
    finally:
        end_tree(process)
        process.stdin.close()
        process.stdout.close()


def test_a_host_agent_that_is_to_end_does_so_also_where_nobody_reads_any_more(tmp_path):
    """MPI's daemon there never stops writing."""
    go = tmp_path / "go"
    daemon = f"while [ ! -e {go} ]; do :; done; exec yes"
    process = host_agent(SECRET_OF_JOB, daemon)
    try:
        process.stdin.write(frame(END, payload=b"15 0") + frame(PING))
        pings = (kind for kind, _ in frames_of(process) if kind == PING)
        assert [next(pings), next(pings)]  # one at its start, and the answer
        go.touch()
        process.wait(30)
    finally:
        end_tree(process)
        process.stdin.close()
        process.stdout.close()


def test_a_host_agent_that_hears_nothing_for_the_limit_says_so_and_ends():
    """The first sign of its end that hvdrun reads is why."""
    process = host_agent(SECRET_OF_JOB, "exec sleep 90", limit_s=2)
    try:
        said = [(kind, payload) for kind, payload in frames_of(process) if kind != PING]
        assert (said[0][0], said[0][1].split()[0]) == (GAVE_UP, b"2")
        process.wait(30)
    finally:
        end_tree(process)
        process.stdin.close()
        process.stdout.close()


def test_a_host_agent_that_was_stopped_does_not_count_that_time():
    """Nor was hvdrun, perhaps: their machines were suspended together."""
    process = host_agent(SECRET_OF_JOB, "exec sleep 90", limit_s=4)
    try:
        process.stdin.write(frame(PING))
        frames = frames_of(process)
        assert [next(frames)[0], next(frames)[0]] == [PING, PING]
        process.send_signal(signal.SIGSTOP)
        time.sleep(4.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        process.stdin.write(frame(PING))
        assert next(frames)[0] == PING
    finally:
        end_tree(process)
        process.stdin.close()
        process.stdout.close()


def test_why_a_host_gave_hvdrun_up_reaches_the_job_with_the_time_by_its_own_clock(monkeypatch):
    told = []
    with link_to_a_host() as (link, selector, far):
        link.tell = told.append
        now_ns = time.monotonic_ns()
        far.send(HELLO + frame(PING, payload=b"%d" % (now_ns - 10**12)))  # 1000 s behind
        read_what_is_there(selector)
        far.send(frame(GAVE_UP, payload=b"30 %d" % (now_ns - 10**12 + 5 * 10**9)))
        read_what_is_there(selector)
    gave_up = told[-1]
    assert (type(gave_up), gave_up.host, gave_up.silent_s) == (HostGaveUp, "server9", 30.0)
    assert now_ns / 1e9 + 5 <= gave_up.at <= time.monotonic() + 5


def test_a_host_agent_that_can_open_no_more_files_says_so():
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (7, 7))

    process = host_agent(SECRET_OF_JOB, "exec yes", limit)
    try:
        said = [said for said in frames_of(process) if said[0] != PING]
        assert said == [(REFUSED, b"lacks 24"), (BYE, b"1")]
    finally:
        process.stdin.close()
        process.stdout.close()
        end_tree(process)


def test_a_job_goes_on_with_the_connection_that_preflight_had():
    with link_and_role(HELLO, b"A=1") as (link, selector, far, role, told):
        assert told == [HostTalks("server9")]
        assert given(far) == [(VARIABLES, b"A=1"), (START, START_OF_JOB)]
        far.send(frame(BYE, payload=b"3"))
        read_what_is_there(selector)
        assert given(role) == [(BYE, b"3")]  # the role ends as MPI's daemon has
        assert role.recv(1) == b""
        assert link.how_it_ended().daemon_status == 3


def test_if_mpirun_ends_the_role_the_daemon_is_ended_as_if_ssh_had_gone():
    with link_and_role(HELLO) as (link, selector, far, role, _):
        given(far)
        role.close()
        read_what_is_there(selector)
        assert far.recv(1) == b""
        assert not link.closed  # it hears how that goes


def test_if_the_connection_ends_the_role_fails_as_ssh_does():
    with link_and_role(HELLO) as (link, selector, far, role, told):
        far.close()
        read_what_is_there(selector)
        assert told[-1] is link
        assert given(role) == [(BYE, b"255")]


def test_an_ssh_that_is_not_there_is_said_as_by_a_shell():
    told, closed = [], []
    asked, role = socket.socketpair()
    with selectors.DefaultSelector() as selector, role:
        calls = (lambda *_: None, told.append, lambda _: None, closed.append)
        wish = (*WISH, b"/no/such/ssh", b"server9")
        link = HostLink(asked, wish, None, {}, SECRET_OF_JOB, selector, *calls)
        while not closed:
            read_what_is_there(selector)
        assert b"/no/such/ssh: No such file or directory (Debian:" in told[0].text
        assert not link.talking
        assert given(role) == [(BYE, b"255")]
