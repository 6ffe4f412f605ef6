"""Jobs on several hosts that fail half-way: what hvdrun reports, how long the end takes, and
that nothing is left behind.

What was found is written as a table to build/rig-failures-MPI.md.
"""

import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest

from hvdrun.job.course import ONE_ACT_S
from tests.harness.worlds import ROOT
from tests.rig.conftest import job

pytestmark = [pytest.mark.rig, pytest.mark.long]

LIMIT_S = 60.0
HOSTS = "server1:2,server2:2"
SIZE = 4

# All ranks but one wait in a collective; that one, on the other host, fails when it is told to.
JOB = """
from mpi4py import MPI
import os, signal, sys, time
if {ignores_term}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
comm = MPI.COMM_WORLD
comm.Barrier()
print("up", flush=True)
if comm.rank == 2:
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    print("the reason", file=sys.stderr, flush=True)
    {end}
comm.allreduce(1)
time.sleep(90)
"""


@dataclass(frozen=True)
class Case:
    """A way to make the job fail, and the report that hvdrun must print."""

    name: str
    code: int
    says: str  # in the report, a regular expression
    end: str = "time.sleep(90)"  # what rank 2 does
    act: Callable | None = None  # what happens to hvdrun or a host instead
    or_code: int | None = None
    ignores_term: bool = False  # its ranks
    options: tuple[str, ...] = ()  # hvdrun's


def rank(how):
    return f"hvdrun: rank 2 on server2 {how}.* after"


def to_hvdrun(number):
    def act(rig):
        rig("exec", "server1", "pkill", f"-{number}", "-f", "bin/hvdrun -H")

    return act


def to_server2(*words):
    return lambda rig: rig(words[0], "server2", *words[1:])


def all_of(*acts):
    def act(rig):
        for one in acts:
            one(rig)

    return act


TWICE = all_of(to_hvdrun("INT"), lambda rig: time.sleep(2 * ONE_ACT_S), to_hvdrun("INT"))
KILLED = "hvdrun: Ctrl-C again: killing everything now"


LOST = "hvdrun: server2 is lost: "
SILENT = LOST + "it has given no sign of life for [67] s, and the limit is 6 s"
SOON = ("--host-timeout", "6")
RAISES = "raise ArithmeticError('the loss is not a number')"
CASES = [
    Case("SIGKILL", 137, rank("was ended by SIGKILL"), "os.kill(os.getpid(), 9)"),
    Case("SIGSEGV", 139, rank("was ended by SIGSEGV"), "os.kill(os.getpid(), 11)"),
    Case("os._exit(3)", 3, rank("ended with exit code 3"), "os._exit(3)"),
    Case("MPI_Abort(7)", 7, rank("ended with exit code 7"), "comm.Abort(7)"),
    Case("host cut off", 72, SILENT, act=to_server2("cut"), options=SOON),
    Case("host without power", 72, SILENT, act=to_server2("kill"), options=SOON),
    Case("host killed, link up", 72, LOST, act=to_server2("kill", "--loud")),
    Case("hvdrun killed", 137, "", act=to_hvdrun("KILL")),
    Case("Ctrl-C", 130, "hvdrun: Ctrl-C: the 4 ranks have 3 s to end", act=to_hvdrun("INT")),
    Case("TERM", 143, "hvdrun: SIGTERM: the 4 ranks have 20 s to end", act=to_hvdrun("TERM")),
    Case("Ctrl-C twice, TERM ignored", 130, KILLED, act=TWICE, ignores_term=True),
    Case(
        "host cut off and Ctrl-C twice, TERM ignored",
        130,
        KILLED,
        act=all_of(to_server2("cut"), TWICE),
        ignores_term=True,
        options=SOON,
    ),
    Case(
        "host cut off, TERM ignored",
        72,
        SILENT,
        act=to_server2("cut"),
        ignores_term=True,
        options=SOON,
    ),
    Case("hvdrun killed, TERM ignored", 137, "", act=to_hvdrun("KILL"), ignores_term=True),
    # Under Open MPI another rank may fail of it first, with its code.
    Case("os._exit(0)", 73, rank("(had )?ended with exit code 0"), "os._exit(0)", or_code=14),
]
WITH_HVDLITE = [
    Case("sys.exit(3)", 3, rank("ended with exit code 3"), "sys.exit(3)"),
    Case("exception", 1, "ArithmeticError: the loss is not a number", RAISES),
]
LEARNING = """
import hvdlite as hvd, torch, os, sys, time
hvd.init()
hvd.allreduce(torch.ones(3))
print("up", flush=True)
if hvd.rank() == 2:
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    print("the reason", file=sys.stderr, flush=True)
    {end}
hvd.allreduce(torch.ones(3))
"""


@pytest.fixture(scope="module")
def table():
    rows: dict[str, list[str]] = {}
    yield rows
    (ROOT / "build").mkdir(exist_ok=True)
    for mpi, lines in rows.items():
        heads = ("failure", "exit code", "hvdrun said", "hvdrun ended", "all ended", "left behind")
        text = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines]
        (ROOT / "build" / f"rig-failures-{mpi}.md").write_text("\n".join(text) + "\n")


@pytest.mark.parametrize("case", [*CASES, *WITH_HVDLITE], ids=lambda case: case.name)
def test_a_job_that_fails_in_the_middle(rig, python, table, case):
    go = rig.share / "go"
    go.unlink(missing_ok=True)
    before = {host: rig.files(host) for host in ("server1", "server2")}
    text = (LEARNING if case in WITH_HVDLITE else JOB).format(
        go=str(go), end=case.end, ignores_term=case.ignores_term
    )
    hvdrun = [python.with_name("hvdrun"), "-H", HOSTS, *case.options, python, "-c", text]
    with job(rig.inside("server1", *hvdrun), SIZE) as process:
        begin = time.monotonic()
        if case.act is None:
            go.touch()
        else:
            case.act(rig)
        _, said = process.communicate(timeout=LIMIT_S)
        ended_s = time.monotonic() - begin
        rig.assert_nothing_left()
        gone_s = time.monotonic() - begin
    assert process.returncode in (case.code, case.or_code), said
    assert re.search(case.says, said), said
    assert case.act is not None or "the reason" in said, said
    rig.restore()
    left = [f"{host}: {set(rig.files(host)) - set(files)}" for host, files in before.items()]
    assert all(line.endswith("set()") for line in left), left
    last = [line for line in said.splitlines() if line.startswith("hvdrun: ")][:1]
    mpi = "openmpi" if python.parents[1].name == ".venv" else "mpich"
    table.setdefault(mpi, []).append(
        f"| {case.name} | {process.returncode} | {' '.join(last) or '-'} |"
        f" {ended_s:.1f} s | {gone_s:.1f} s | nothing |"
    )


@pytest.mark.wide_in("mpich")
def test_what_hvdrun_did_not_start_is_not_touched(rig, python):
    others = [subprocess.Popen(rig.inside(host, "sleep", "987")) for host in ("server1", "server2")]
    try:
        while sum(map(len, rig.processes().values())) < 2:
            time.sleep(0.05)
        command = ["-H", HOSTS, "sh", "-c", "echo up; exec sleep 987"]
        with job(rig.inside("server1", python.with_name("hvdrun"), *command), SIZE) as process:
            rig("exec", "server1", "pkill", "-TERM", "-f", "bin/hvdrun -H")
            process.communicate(timeout=LIMIT_S)
        assert rig.processes() == {"server1": ["sleep 987"], "server2": ["sleep 987"]}
    finally:
        for other in others:
            psutil.Process(other.pid).send_signal(signal.SIGTERM)
            other.wait(LIMIT_S)


def test_blanks_and_worse_in_the_paths_are_no_matter(rig, python):
    folder = rig.share / "a b;$(touch made)"
    folder.mkdir(exist_ok=True)
    venv = folder / python.parents[1].name
    venv.symlink_to(python.parents[1])
    (folder / "the script.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:])")
    hvdrun = [venv / "bin" / "python", "-m", "hvdrun", "-H", "server1:1,server2:1"]
    done = subprocess.run(
        rig.inside("server1", *hvdrun, "python", "the script.py", "x y", "`touch made`"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    line = f"{folder} ['x y', '`touch made`']"
    assert sorted(done.stdout.splitlines()) == [f"[0] {line}", f"[1] {line}"], done
    assert not (folder / "made").exists()
    assert "made" not in rig("exec", "server2", "ls", "/root")


@pytest.mark.wide_in("mpich")
def test_a_reader_that_stands_still_costs_no_host(rig, python):
    """For longer than a host may be silent."""
    lines = 200_000
    code = f"import os\nfor i in range({lines}): print(i, 'x' * 70)"
    hvdrun = [python.with_name("hvdrun"), "-H", "server1:1,server2:1", *SOON]
    with job(rig.inside("server1", *hvdrun, python, "-c", code)) as process:
        assert process.stdout.readline()
        time.sleep(10)
        stdout, stderr = process.stdout.read(), process.stderr.read()
        process.wait(LIMIT_S)
    assert process.returncode == 0, stderr
    assert len(stdout.splitlines()) == 2 * lines - 1


@pytest.mark.wide_in("mpich")
def test_a_host_that_does_not_come_up_in_time_is_named(hvdrun, rig):
    assert hvdrun("-H", "server1:1,server2:1", "true").code == 0  # preflight remembers that
    rig("cut", "server2")
    done = hvdrun("-H", "server1:1,server2:1", "--start-timeout", "3", "true")
    assert done.code == 75, done
    assert "server2: 1 rank not started: ssh has not connected" in done.stderr
