"""hvdrun on one machine, for real, under both MPIs."""

import json
import os
import re
import signal
import subprocess
import textwrap

import psutil
import pytest

from hvdrun.agent.host_agent import safe_prefix
from hvdrun.agent.rank.keeper import is_exiting
from hvdrun.machine.resources import physical_cores
from tests.harness.busy import without_delays
from tests.harness.worlds import ROOT, end_tree

LIMIT_S = 30.0


def script(text):
    return ("-c", textwrap.dedent(text))


def shell(text):
    return ("sh", "-c", text)


def test_the_output_of_each_rank_keeps_its_stream_and_its_tag(hvdrun):
    done = hvdrun("-np", "2", *shell("echo out $RANK of $WORLD_SIZE; echo err $LOCAL_RANK >&2"))
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] out 0 of 2", "[1] out 1 of 2"]
    said = without_delays(done.stderr)
    assert sorted(said.splitlines()) == ["[0] err 0", "[1] err 1"]


@pytest.mark.wide_in("mpich")
def test_each_rank_has_its_files_with_exactly_what_it_wrote(hvdrun, tmp_path):
    options = ("-np", "2", "--output-filename", tmp_path / "logs")
    done = hvdrun(*options, *shell("echo out $RANK; printf 'err\\r' >&2"))
    assert done.code == 0, done
    written = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.glob("*/*/*")}
    assert written == {
        f"logs/rank.{rank}/{stream}": text
        for rank in range(2)
        for stream, text in (("stdout", b"out %d\n" % rank), ("stderr", b"err\r"))
    }


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "


@pytest.mark.wide_in("openmpi")
def test_each_line_has_its_time_where_it_is_wanted(hvdrun, tmp_path):
    options = ("-np", "2", "--output-dir", tmp_path, "-prefix-timestamp")
    done = hvdrun(*options, *shell("echo out; printf 'a\nb' >&2"))
    assert done.code == 0, done
    assert re.fullmatch(f"({TIME}\\[[01]\\] out\n){{2}}", done.stdout), done
    for rank in range(2):
        assert re.fullmatch(f"{TIME}out\n", (tmp_path / f"rank.{rank}/stdout").read_text())
        assert re.fullmatch(f"{TIME}a\n{TIME}b", (tmp_path / f"rank.{rank}/stderr").read_text())


@pytest.mark.wide_in("mpich")
def test_a_folder_for_the_output_that_cannot_be_made_is_said_before_anything_runs(hvdrun):
    done = hvdrun("-np", "1", "--output-dir", "/dev/full/logs", "echo", "ran")
    assert (done.code, done.stdout) == (64, "")
    assert "--output-dir /dev/full/logs: Not a directory" in done.stderr


def test_a_rank_that_leaves_with_0_in_mid_job_is_named(hvdrun, python):
    done = hvdrun("-np", "3", python, *script(WAITING.format("os._exit(0)")))
    assert done.code == 73, done
    assert "hvdrun: rank 1 on localhost ended with exit code 0 after" in done.stderr


@pytest.mark.parametrize("python", ["mpich"], indirect=True)  # Open MPI ends them
def test_ranks_that_all_leave_with_0_are_no_failure(hvdrun, python):
    text = """
        from mpi4py import MPI
        import os
        MPI.COMM_WORLD.Barrier()
        os._exit(0)
    """
    done = hvdrun("-np", "2", python, *script(text))
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.wide_in("openmpi")
def test_one_rank_has_no_tag(hvdrun):
    assert hvdrun("-np", "1", "echo", "hello").stdout == "hello\n"


def test_mpi_joins_the_ranks(hvdrun, python):
    done = hvdrun(
        "-np",
        "3",
        python,
        *script("from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.size, c.allreduce(c.rank))"),
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 3 3", "[1] 3 3", "[2] 3 3"], done


def test_arguments_and_values_arrive_as_they_were_given(hvdrun, python, monkeypatch):
    monkeypatch.setenv("ODD", 'a b;$x"\n,c:')
    words = ["", " ", ":", "\\:", "$HOME", "'", "a;b", "*", "--np", "ü"]
    code = "import os, sys; print([sys.argv[1:], os.environ['ODD'], os.environ['GIVEN']])"
    done = hvdrun("-np", "1", "-x", "GIVEN=x=y z", python, "-c", code, *words)
    assert done.stdout == f"{[words, os.environ['ODD'], 'x=y z']}\n", done


SHOW_CORES = """
import os
print(sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS"), flush=True)
"""


def test_each_rank_has_cores_of_its_own_and_as_many_threads(hvdrun, python):
    done = hvdrun("-np", "2", "-x", "OMP_NUM_THREADS=", python, *script(SHOW_CORES))
    usable = sorted(os.sched_getaffinity(0))
    threads = max(1, physical_cores() // 2)
    lines = sorted(line[4:] for line in done.stdout.splitlines())
    assert [line.split("] ")[1] for line in lines] == [str(threads)] * 2, done
    given_out = [cpu for line in lines for cpu in json.loads(line.split("] ")[0] + "]")]
    assert sorted(given_out) == (usable if physical_cores() > 1 else sorted(usable * 2))


def test_ranks_that_mpirun_binds_are_left_as_they_are(hvdrun, python):
    done = hvdrun("-np", "2", "--binding-args", "--bind-to none", python, *script(SHOW_CORES))
    line = f"{sorted(os.sched_getaffinity(0))} 1"  # the tests themselves set the variable
    assert sorted(done.stdout.splitlines()) == [f"[0] {line}", f"[1] {line}"], done


def test_the_exit_code_is_that_of_the_rank_that_failed_first(hvdrun):
    done = hvdrun("-np", "3", *shell("[ $RANK = 1 ] && { echo why >&2; exit 3; }; exec sleep 60"))
    assert done.code == 3
    assert "rank 1 on localhost ended with exit code 3" in done.stderr
    assert done.stderr.endswith("ended\nhvdrun: its last lines on stderr are just above\n")
    assert done.stderr.count("why\n") == 1


@pytest.mark.wide_in("mpich")
def test_the_last_lines_are_repeated_where_much_else_was_shown_after_them(hvdrun, tmp_path):
    said, talked = tmp_path / "said", tmp_path / "talked"
    until = "until [ -e {} ]; do sleep 0.1; done; sleep 0.5"
    fails = f"echo why >&2; touch {said}; {until.format(talked)}; exit 3"
    talks = f"{until.format(said)}; seq 100 >&2; touch {talked}; exec sleep 60"
    done = hvdrun("-np", "2", *shell(f"[ $RANK = 1 ] && {{ {fails}; }}; {talks}"))
    assert done.code == 3
    assert done.stderr.endswith("hvdrun: its last lines on stderr:\n    why\n")


@pytest.mark.parametrize("pause_s", [0, 1], ids=["at once", "while it still runs"])
def test_a_traceback_is_shown_once(hvdrun, python, pause_s):
    """hvdrun holds it for a moment: the other ranks may write the same."""
    text = f"""
        import atexit, os, time
        if os.environ["RANK"] == "0":
            time.sleep(60)
        atexit.register(time.sleep, {pause_s})
        raise ValueError("no data")
    """
    done = hvdrun("-np", "2", python, *script(text))
    assert done.code == 1
    assert done.stderr.count("ValueError: no data") == 1, done
    assert "rank 1 on localhost ended with exit code 1" in done.stderr


@pytest.mark.wide_in("openmpi")
def test_a_rank_that_ended_with_0_is_no_cause_of_anothers_own_failure(hvdrun):
    done = hvdrun("-np", "2", *shell("[ $RANK = 0 ] || { sleep 1; echo why >&2; exit 3; }"))
    assert done.code == 3
    assert "this is the cause" not in done.stderr, done


@pytest.mark.wide_in("mpich")
def test_a_rank_that_a_signal_ends_counts_as_128_and_the_signal(hvdrun):
    done = hvdrun("-np", "2", *shell("[ $RANK = 1 ] && kill -SEGV $$; exec sleep 60"))
    assert done.code == 128 + signal.SIGSEGV
    assert "rank 1 on localhost was ended by SIGSEGV" in done.stderr


def test_a_rank_that_fails_before_mpi_is_reported_below_its_traceback(hvdrun, python):
    done = hvdrun("-np", "2", python, *script("import no_such_module"))
    assert done.code == 1
    error, report, _ = done.stderr.splitlines()[-3:]
    assert error.endswith("ModuleNotFoundError: No module named 'no_such_module'"), done
    assert report.startswith("hvdrun: rank ")
    assert "prterun" not in done.stderr
    assert "BAD TERMINATION" not in done.stderr


WAITING = """
    from mpi4py import MPI
    import os, sys
    comm = MPI.COMM_WORLD
    if comm.rank == 1:
        {}
    comm.Barrier()
"""


@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(5)", 5), ("comm.Abort(7)", 7), ("os.kill(os.getpid(), 9)", 137)]
)
def test_a_rank_that_ends_while_the_others_wait_in_mpi_ends_the_job(hvdrun, python, end, code):
    done = hvdrun("-np", "3", python, *script(WAITING.format(end)))
    assert done.code == code, done
    assert "hvdrun: rank 1 on localhost " in done.stderr


def test_ranks_that_ignore_the_first_signal_are_killed(hvdrun):
    done = hvdrun("-np", "2", *shell("trap '' TERM; [ $RANK = 1 ] && exit 4; sleep 60 & wait"))
    assert done.code == 4


@pytest.mark.parametrize("name", ["train.py", "./train.py", "sub/train.py"])
@pytest.mark.parametrize("mode", [0o644, 0o755])  # without a #! line
def test_a_script_without_its_interpreter_is_said_how_to_start(hvdrun, tmp_path, name, mode):
    (tmp_path / "sub").mkdir()
    for path in (tmp_path / "train.py", tmp_path / "sub/train.py"):
        path.write_text("print('ran')")
        path.chmod(mode)
    done = hvdrun("-np", "2", "-x", "A=b", name, "--lr", "1", cwd=tmp_path)
    assert (done.code, done.stdout) == (69, ""), done
    assert done.stderr.count("\n") == 1
    asked = f"did you mean `hvdrun … python {name.removeprefix('./')} --lr 1`?"
    assert asked in done.stderr


@pytest.mark.wide_in("mpich")
def test_a_program_that_is_not_there_is_named(hvdrun):
    done = hvdrun("-np", "2", "no-such-program")
    assert done.code == 69
    assert done.stderr.startswith("hvdrun: 'no-such-program' was not found on localhost")


def test_what_mpirun_refuses_is_shown(hvdrun):
    done = hvdrun("-np", "2", "--mpi-args", "--no-such-option", "true")
    assert done.code == 73
    assert "[mpirun]" in done.stderr
    assert "no-such-option" in done.stderr


HOSTILE = [
    "a b",
    "it's",
    "$(touch made)",
    "`touch made`",
    "x;touch made",
    "x\ntouch made",
    '"',
    "&|<>",
]


@pytest.mark.parametrize("folder", HOSTILE)
def test_the_folder_of_the_installation_runs_no_command_on_a_host(tmp_path, folder):
    """As MPICH and Open MPI write their commands: quoted too little, or not at all."""
    program = tmp_path / folder / "bin" / "daemon"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$0" "$@"\n')
    program.chmod(0o755)
    place = str(tmp_path / folder)
    for text in (
        f'"{program}" --port 1',
        f"PATH={place}/bin:$PATH ; export PATH ; {program} --port 1",
    ):
        done = subprocess.run(
            ["sh", "-c", safe_prefix(text, place)],
            cwd=tmp_path,
            env={**os.environ, "HVDRUN_PREFIX": place},
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"{program} --port 1\n", done
        assert not (tmp_path / "made").exists()


def test_a_folder_that_needs_no_quotes_changes_nothing():
    assert safe_prefix("/opt/venv/bin/prted -x", "/opt/venv") == "/opt/venv/bin/prted -x"


@pytest.mark.wide_in("openmpi")
def test_arguments_and_values_run_no_command(hvdrun, python, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = [*HOSTILE, "--", "-np", "\t", "\\", "%s", "\x7f"]
    for number, word in enumerate(words):
        monkeypatch.setenv(f"HOSTILE_{number}", word)
    names = [f"HOSTILE_{number}" for number in range(len(words))]
    code = f"import os, sys; print([sys.argv[1:], [os.environ[n] for n in {names}]])"
    done = hvdrun("-np", "1", python, "-c", code, *words)
    assert done.stdout == f"{[words, words]}\n", done
    assert not [path for path in (tmp_path / "made", ROOT / "made") if path.exists()]


def test_standard_input_is_that_of_rank_0(python):
    code = "import os, sys; print(os.environ['RANK'], sys.stdin.read().split())"
    done = subprocess.run(
        [python.with_name("hvdrun"), "-np", "2", python, "-c", code],
        input="to the first\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    expected = ["[0] 0 ['to', 'the', 'first']", "[1] 1 []"]
    assert sorted(done.stdout.splitlines()) == expected, done


@pytest.mark.wide_in("openmpi")
def test_nothing_of_a_megabyte_is_lost_or_out_of_order(hvdrun, python):
    code = "import os\nfor i in range(12500): print(i, 'x' * 70)"
    done = hvdrun("-np", "4", python, "-u", "-c", code)
    expected = [f"{i} {'x' * 70}" for i in range(12500)]
    lines = done.stdout.splitlines()
    for rank in range(4):
        tag = f"[{rank}] "
        assert [line[4:] for line in lines if line.startswith(tag)] == expected


@pytest.mark.wide_in("mpich")
def test_a_reader_that_leaves_ends_the_job(python):
    process = subprocess.Popen(
        [python.with_name("hvdrun"), "-np", "2", "yes"], stdout=subprocess.PIPE
    )
    assert process.stdout
    try:
        assert process.stdout.readline() in (b"[0] y\n", b"[1] y\n")
        process.stdout.close()
        assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE
    finally:
        end_tree(process)


def not_under_nohup():
    """Between fork and exec: also where the tests are."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def running(python):
    """hvdrun with two ranks that wait in MPI, and all its processes."""
    code = "from mpi4py import MPI\nimport time\nprint('up', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen(
        [python.with_name("hvdrun"), "-np", "2", python, "-c", code],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=not_under_nohup,
    )
    assert process.stdout
    family: list[psutil.Process] = []
    try:
        for _ in range(2):
            assert process.stdout.readline().endswith(b" up\n")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 7  # mpirun, and per rank a shim, a keeper and the program
        yield process, family
    finally:
        end_tree(process, [p.pid for p in family if p.is_running()])
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_to_hvdrun_ends_everything(running, number):
    process, family = running
    process.send_signal(number)
    assert process.wait(LIMIT_S) == 128 + number
    assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.wide_in("openmpi")
def test_under_nohup_the_end_of_the_terminal_ends_nothing(python, tmp_path):
    over = tmp_path / "over"
    waits = f"while not os.path.exists({str(over)!r}): time.sleep(0.01)"
    code = f"import os, time; print('up', flush=True)\n{waits}"
    process = subprocess.Popen(
        ["nohup", python.with_name("hvdrun"), "-np", "2", python, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    try:
        assert process.stdout.readline().endswith(b" up\n")
        process.send_signal(signal.SIGHUP)
        over.touch()
        assert process.wait(LIMIT_S) == 0
    finally:
        end_tree(process)
        process.stdout.close()


@pytest.mark.wide_in("openmpi")
def test_when_hvdrun_is_killed_nothing_stays(running):
    process, family = running
    process.kill()
    assert not psutil.wait_procs(family, timeout=LIMIT_S)[1]


def test_when_mpirun_is_killed_the_job_ends_and_is_an_error(running):
    process, family = running
    family[0].kill()
    assert process.wait(LIMIT_S) != 0
    assert not psutil.wait_procs(family, timeout=10)[1]


def test_background_processes_of_a_rank_do_not_outlive_it(hvdrun, tmp_path):
    pids = tmp_path / "pids"
    done = hvdrun("-np", "2", *shell(f"sleep 61 & echo $! >> {pids}; setsid sleep 61 & exit 0"))
    assert done.code == 0, done
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_a_process_that_the_kernel_takes_down_is_told_from_one_that_runs():
    assert not is_exiting(os.getpid())
    assert not is_exiting(0)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert is_exiting(child)
    os.waitpid(child, 0)
