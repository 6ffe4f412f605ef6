"""hvdrun in other places: from cron, as root in a container, with names and values of all kinds."""

import os
import shutil
import subprocess

import pytest

from tests.harness.busy import without_delays
from tests.harness.needs import lacking
from tests.harness.worlds import ROOT, python_of

LIMIT_S = 60.0
# What makes the checkout's own package be found where nothing else is set.
IMPORTS = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
# A job whose ranks meet in MPI.
MEET = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1), flush=True)"


def run(command, **options):
    options = {"stdin": subprocess.DEVNULL, "cwd": ROOT, **options}
    return subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, **options)


def close_stdin():
    os.close(0)


def test_from_cron_there_is_no_terminal_no_home_and_no_standard_input(python):
    command = [python, "-m", "hvdrun", "-np", "2", "python", "-c", MEET]
    environ = {**IMPORTS, "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh", "LOGNAME": "root"}
    done = run(command, env=environ, cwd="/", preexec_fn=close_stdin)
    assert sorted(done.stdout.split(b"\n")) == [b"", b"[0] 2", b"[1] 2"], done
    assert without_delays(done.stderr.decode()) == "", done


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_who_starts_it_may_have_closed_its_standard_files(closed, tmp_path):
    job = f"echo out; echo err >&2; cat; echo end > {tmp_path}/end"
    command = [python_of("openmpi"), "-m", "hvdrun", "-np", "1", "sh", "-c", job]
    done = run(["sh", "-c", f'exec "$@" {closed}', "sh", *command])
    assert done.returncode == 0
    assert (tmp_path / "end").exists()
    assert done.stdout == (b"" if " >&-" in f" {closed}" else b"out\n")
    assert done.stderr == (b"" if "2>&-" in closed else b"err\n")


def test_where_nothing_can_be_written_any_more_the_job_ends_and_says_why():
    command = [
        python_of("openmpi"),
        "-m",
        "hvdrun",
        "-np",
        "1",
        "sh",
        "-c",
        "echo a; exec sleep 60",
    ]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S
        )
    assert done.returncode == 74
    said = b"hvdrun: the ranks' output can't be written: No space left on device\n"
    assert done.stderr == said


def test_without_any_variable_the_ranks_start_all_the_same(python):
    done = run([python, "-m", "hvdrun", "-np", "2", "python", "-c", MEET], env=IMPORTS)
    assert sorted(done.stdout.split(b"\n")) == [b"", b"[0] 2", b"[1] 2"], done
    assert run([python, "-m", "hvdrun", "-np", "2", "true"], env=IMPORTS).returncode == 0


CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--uts", "--ipc"]
# A name that nobody can look up, and hardly any shared memory, as docker gives it.
SETUP = "hostname 3f2a9c1d77e0; mount -t tmpfs -o size=64m tmpfs /dev/shm"


def test_as_root_in_a_container_where_it_is_the_first_process(python):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        lacking("a container needs root and unshare")
    job = [python, "-m", "hvdrun", "-np", "2", python, "-c", f"{MEET}; import os; os.getpid()"]
    done = run([*CONTAINER, "sh", "-c", f'{SETUP}; exec "$@"', "sh", *job])
    assert (done.returncode, done.stdout.count(b"] 2\n")) == (0, 2), done


@pytest.mark.long
def test_a_function_is_run_in_a_container_without_network_users_and_standard_input(python):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        lacking("a container needs root and unshare")
    setup = f"{SETUP}; ip link set lo up; mount --bind /dev/null /etc/passwd"
    job = (
        "import hvdlite as hvd, torch\n"
        "def work(x):\n"
        "    hvd.init()\n"
        "    return hvd.allreduce(torch.tensor([x]), op=hvd.Sum).item()\n"
        "print(hvd.run(work, (3,), num_proc=2))"
    )
    done = run(
        [*CONTAINER, "--net", "sh", "-c", f'{setup}; exec "$@"', "sh", python, "-c", job],
        env={**IMPORTS, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        preexec_fn=close_stdin,
    )
    assert (done.returncode, done.stdout) == (0, b"[6, 6]\n"), done


@pytest.mark.wide_in("mpich")
def test_a_rank_that_fails_in_a_container_ends_it(python):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        lacking("a container needs root and unshare")
    job = [python, "-m", "hvdrun", "-np", "2", "sh", "-c", "[ $RANK = 1 ] && exit 3; exec sleep 50"]
    done = run([*CONTAINER, *job])
    assert done.returncode == 3, done


ODD = "a 'b' \"c\" $(touch hit) `touch hit`; touch hit & # ü"


def test_folders_scripts_and_arguments_may_have_any_name(python, tmp_path):
    folder = tmp_path / ODD
    folder.mkdir()
    script = folder / f"train {ODD}.py"
    script.write_text("import os, sys; print([os.getcwd(), *sys.argv[1:]])")
    command = [python, "-m", "hvdrun", "-np", "1", python, script, ODD, "", "\n", "-np"]
    done = run(command, cwd=folder)
    assert done.stdout.decode() == f"{[str(folder), ODD, '', chr(10), '-np']}\n", done
    assert [path.name for path in folder.iterdir()] == [script.name]


VALUES = {
    "NOT_UTF8": b"\xff\xfe caf\xe9",
    "LINES": b"a\nb\n\n",
    "EMPTY": b"",
    "SHELLSHOCK": b"() { :;}; touch hit",
    "QUOTES": b"'\"\\$x `y` ,:;=&|<>*?~!#%{}[]",
    "LONG": b"x" * 100_000,
    "BASH_FUNC_module%%": b"() { echo hit\n}",
}


def test_values_of_variables_may_be_anything(python):
    code = (
        "import os; print({n: v for n, v in sorted(os.environb.items())"
        f" if n in {sorted(name.encode() for name in VALUES)}}})"
    )
    environ = {**{os.fsencode(n): os.fsencode(v) for n, v in os.environ.items()}}
    environ.update({name.encode(): value for name, value in VALUES.items()})
    done = run([python, "-m", "hvdrun", "-np", "2", python, "-c", code], env=environ)
    expected = {name.encode(): VALUES[name] for name in sorted(VALUES)}
    lines = [line.partition(b"] ")[2].decode() for line in done.stdout.splitlines()]
    assert lines == [str(expected)] * 2, done.stderr


OUTER = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "7",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "elsewhere",
    "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_in_another_job_the_ranks_have_their_own_numbers_and_address(python):
    code = (
        f"import os; print(*(os.environ.get(n) for n in {[*OUTER]} if n != 'MASTER_PORT'),"
        " os.environ['MASTER_PORT'] != '1')"
    )
    job = [python, "-m", "hvdrun", "-np", "2", "-x", "LOCAL_WORLD_SIZE=8", python, "-c", code]
    done = run(job, env={**os.environ, **OUTER})
    said = sorted(done.stdout.decode().splitlines())
    assert said == [f"[{n}] {n} 2 {n} 2 127.0.0.1 None True" for n in range(2)], done
    assert b"-x LOCAL_WORLD_SIZE has no effect" in done.stderr


NESTED = """
import os, subprocess, sys
import hvdlite as hvd

hvd.init()
if len(sys.argv) > 1:
    hvd.barrier()
    print("inner", hvd.rank(), hvd.size(), flush=True)
elif hvd.rank() == 1:
    job = [sys.executable, "-m", "hvdrun", "-np", "2", sys.executable, sys.argv[0], "inner"]
    subprocess.run(job, check=True, env={**os.environ, "HVDLITE_NESTED": "1"})
hvd.barrier()
"""


@pytest.mark.wide_in("openmpi")
def test_a_rank_may_run_a_job_of_its_own(python, tmp_path):
    script = tmp_path / "nested.py"
    script.write_text(NESTED)
    done = run([python, "-m", "hvdrun", "-np", "2", python, script])
    lines = sorted(done.stdout.decode().splitlines())
    assert lines == ["[1] [0] inner 0 2", "[1] [1] inner 1 2"], done
    assert done.returncode == 0


@pytest.mark.wide_in("mpich")
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_standard_stream_that_is_closed_is_no_obstacle(python, closed, tmp_path):
    seen = tmp_path / "seen"
    command = [python, "-m", "hvdrun", "-np", "2", "sh", "-c", f"echo $RANK >> {seen}"]
    done = run(command, preexec_fn=lambda: os.close(closed))
    assert (done.returncode, sorted(seen.read_text().split())) == (0, ["0", "1"]), done


LISTENS = """
import os, socket
def listening():
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(fd) for fd in fds if os.path.lexists(fd)}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{name}").readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add(fields[1].partition(":")[0])
    return found
before = listening()
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(1) == 2
print(sorted(listening() - before - {"0100007F"}))
"""


def test_on_one_host_no_rank_listens_for_other_hosts(python):
    done = run([python, "-m", "hvdrun", "-np", "2", python, "-c", LISTENS])
    assert sorted(done.stdout.splitlines()) == [b"[0] []", b"[1] []"], done
