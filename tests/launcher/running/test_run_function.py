"""`hvdlite.run`: a function as a job."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest

import hvdlite as hvd
from hvdlite.errors import LaunchError, RankError
from hvdlite.run_function import HEAD, _Job, _relay
from hvdrun.job.course import ONE_ACT_S
from hvdrun.machine import notes
from tests.harness.worlds import end_tree, python_of
from tests.launcher.rendezvous.loops import free_port

LIMIT_S = 90.0


def notebook(python, cells):
    """A program that has no file, and whose standard output is none, as in a notebook."""
    program = f"""
import io, sys
shown = sys.stdout
class Cell(io.StringIO):
    def write(self, text):
        shown.write(text)
sys.stdout = Cell()
{textwrap.dedent(cells)}
"""
    return subprocess.run(
        [python, "-"], input=program, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.wide_in("openmpi")
def test_results_come_by_rank_from_a_function_that_has_no_file(python):
    done = notebook(
        python,
        """
        import hvdlite as hvd, torch

        class Point:
            def __init__(self, x):
                self.x = x

        def helper(rank):
            return Point(rank + 10)

        def work(base, *, name):
            hvd.init()
            print(name, hvd.rank(), end="")
            total = hvd.allreduce(torch.tensor([hvd.rank() + base]), op=hvd.Sum).item()
            return helper(hvd.rank()), total, b"x" * 20_000_000

        for point, total, much in hvd.run(work, (5,), {"name": "it's rank"}, num_proc=2):
            print(isinstance(point, Point), point.x, total, len(much))
        """,
    )
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["True 10 11 20000000", "True 11 11 20000000"], done
    assert sorted(lines[:-2]) == ["[0] it's rank 0", "[1] it's rank 1"]


@pytest.mark.wide_in("mpich")
def test_an_exception_of_a_rank_names_it_and_its_host_and_has_its_traceback(python):
    done = notebook(
        python,
        """
        import os, signal, socket
        import hvdlite as hvd, torch

        class Odd(Exception):
            pass

        def fails():
            hvd.init()
            if hvd.rank() == 1:
                raise Odd("no good")
            hvd.allreduce(torch.ones(1))

        try:
            hvd.run(fails, num_proc=2)
        except hvd.RankError as error:
            print(error.rank, error.host == socket.gethostname(), isinstance(error.__cause__, Odd))
            print(str(error).splitlines()[0].replace(error.host, "HOST"))
            print(error.traceback.splitlines()[1].strip().partition(", ")[2])
            print(error.traceback.splitlines()[-1])
        """,
    )
    assert done.stdout.splitlines()[-4:] == [
        "1 True True",
        "rank 1 on HOST: Traceback (most recent call last):",
        "line 18, in fails",
        "Odd: no good",
    ], done


@pytest.mark.wide_in("openmpi")
def test_where_each_host_calls_it_node_0_gets_the_results(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import hvdlite as hvd\nprint('gets', hvd.run(lambda: (hvd.init(), hvd.rank()), np=2))\n"
    )
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NNODES": "2"}
    nodes = [
        subprocess.Popen(
            [python, script],
            env={**os.environ, **place, "NODE_RANK": str(number), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 0)
    ]
    try:
        said = [node.communicate(timeout=LIMIT_S) for node in nodes]
    finally:
        for node in nodes:
            end_tree(node)
    assert [out for out, _ in said] == ["gets []\n", "gets [(None, 0), (None, 1)]\n"], said
    assert [node.returncode for node in nodes] == [0, 0], said


def sent(rank, has_returned, data, parts=2):
    """As hvdrun writes it into the caller's file, in parts."""
    whole = HEAD.pack(has_returned, len(data)) + data
    size = len(whole) // parts + 1
    return [notes.pack_result(rank, whole[at : at + size]) for at in range(0, len(whole), size)]


def collected(*parts):
    job = _Job()
    file = os.memfd_create("results")
    try:
        os.write(file, b"".join(parts))
        job._collect(file)
    finally:
        os.close(file)
    return job


def test_what_several_ranks_send_is_put_together_and_half_a_result_is_none():
    (a, b), (c, d) = sent(0, True, b"of rank 0"), sent(1, True, b"")
    half = sent(2, True, b"of rank 2")[0]
    job = collected(a, c, half, d, b)
    assert {rank: bytes(data) for rank, data in job.returned.items()} == {0: b"of rank 0", 1: b""}


def test_a_character_that_the_pipe_cuts_in_two_is_shown_whole_and_a_prompt_at_once():
    reader, writer = os.pipe()
    shown = []

    def write(text):
        shown.append(text)
        if len(shown) == 1:
            os.write(writer, b"\x9f?")
            os.close(writer)

    os.write(writer, b"[0] size in m\xc3")
    with open(reader, "rb") as stdout:
        _relay(stdout, SimpleNamespace(write=write, flush=lambda: None))
    assert shown == ["[0] size in m", "\xdf?"]


def test_no_module_comes_from_a_working_directory_that_is_not_the_scripts(tmp_path):
    for name in ("hvdrun", "hvdlite", "torch", "click"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of somebody else')")
    (tmp_path / "of_the_script").mkdir()
    script = tmp_path / "of_the_script" / "script.py"
    script.write_text("import hvdlite, os\nprint(hvdlite.run(os.getcwd, num_proc=1))")
    done = subprocess.run(
        [python_of("openmpi"), script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == f"{[str(tmp_path)]}\n", done


def failed(*said):
    job = _Job()
    job.last_lines = list(said)
    return job


def test_a_rank_that_could_not_say_why_is_reported_as_hvdrun_does():
    job = failed("hvdrun: rank 1 on server2 was ended by SIGKILL (Killed) after 3.8 s", "    said")
    with pytest.raises(RankError, match="rank 1 on server2: was ended by SIGKILL") as caught:
        job.check(137, 2, "here")
    assert (caught.value.rank, caught.value.host) == (1, "server2")


def test_what_hvdrun_could_not_do_is_told_in_its_words():
    job = failed("hvdrun: a note", "hvdrun: 1 of 2 hosts is not ready", " host  finding")
    with pytest.raises(LaunchError, match=r"\A1 of 2 hosts is not ready\n host  finding\Z"):
        job.check(70, 2, "here")
    with pytest.raises(LaunchError, match="exit code 73"):
        failed().check(73, 2, "here")


def test_a_rank_that_left_earlier_is_not_taken_for_the_one_that_failed():
    job = failed(
        "hvdrun: rank 0 on server1 ended with exit code 0 1 min 00 s ago, and 2 other ranks …",
        "hvdrun: rank 2 on server2 ended with exit code 14 after 2 min 03 s (at 20:48:31); …",
        "hvdrun: rank 0 on server1 had ended with exit code 0 after 5.0 s: if the others …",
    )
    with pytest.raises(RankError, match="rank 2 on server2: ended with exit code 14 after"):
        job.check(14, 3, "here")
    job.last_lines[1:] = ["hvdrun: server2 is lost: it has given no sign of life"]
    with pytest.raises(LaunchError, match=r"\Aserver2 is lost"):
        job.check(72, 3, "here")


@pytest.mark.parametrize(
    "code",
    [0, pytest.param("no data", marks=pytest.mark.wide), pytest.param(3, marks=pytest.mark.wide)],
)
def test_a_function_that_calls_sys_exit_has_returned_nothing(code):
    with pytest.raises(RankError, match=rf"called sys\.exit\({code!r}\) and so returned") as caught:
        hvd.run(lambda: sys.exit(code), num_proc=1)
    assert type(caught.value.__cause__) is SystemExit
    assert "Traceback" not in caught.value.traceback


@pytest.mark.parametrize("given", [{"num_proc": 0}, {"np": -1}], ids=str)
def test_a_job_has_at_least_one_rank(given):
    with pytest.raises(ValueError, match="has at least one rank"):
        hvd.run(len, ("four",), **given)


def test_the_controllers_of_horovods_run_have_no_effect_and_a_line_says_so(capfd):
    assert hvd.run(len, ("four",), num_proc=1, use_gloo=True, use_mpi=True) == [4]
    said = capfd.readouterr().err
    for flag in ("--use-gloo", "--use-mpi"):
        assert said.count(f"hvdrun: {flag} has no effect: the ranks always run on MPI") == 1


def test_a_rank_that_ends_well_before_its_function_does_has_failed():
    job = failed()
    job.returned[0] = b"its result"
    with pytest.raises(RankError, match="rank 1 on here: ended with exit code 0 before"):
        job.check(0, 2, "here")


def test_the_first_exception_counts_and_the_error_can_be_sent_on():
    job = failed()
    of_it = pickle.dumps(("server", "Traceback of it", b""))
    job.raised = collected(*sent(2, False, of_it), *sent(0, False, of_it)).raised
    with pytest.raises(RankError) as caught:
        job.check(1, 2, "here")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.rank, again.host, again.traceback) == (2, "server", "Traceback of it")


@pytest.fixture
def calling():
    """calling(does): a program that calls a function as a job of one rank, once that is up."""
    started = []

    def start(does):
        program = (
            "import signal, time, hvdlite as hvd\n"
            "def work():\n"
            f"    {does}\n"
            "    print('up', flush=True)\n"
            "    time.sleep(60)\n"
            "hvd.run(work, num_proc=1)"
        )
        process = subprocess.Popen(
            [python_of("openmpi"), "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout
        started.append(process)
        assert process.stdout.readline() == "up\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4  # hvdrun, mpirun, a shim or keeper and the rank
        return process, family

    yield start
    for process in started:
        end_tree(process)
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.wide), signal.SIGKILL], ids=str
)
def test_who_stops_the_caller_stops_the_job(calling, number):
    process, family = calling("pass")
    process.send_signal(number)
    assert process.wait(LIMIT_S) == -number
    assert not psutil.wait_procs(family, timeout=20)[1]


def test_what_a_rank_prints_after_ctrl_c_to_the_caller_is_shown(calling):
    """More than pipes hold: the rank would wait for a reader instead of saving."""
    saves = "(print('x' * 500_000), print('saved', flush=True), exit(0))"
    process, family = calling(f"signal.signal(2, lambda *_: {saves})")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert out == "x" * 500_000 + "\nsaved\n"
    assert process.returncode == -signal.SIGINT
    assert not psutil.wait_procs(family, timeout=20)[1]


@pytest.mark.long
def test_who_stops_the_caller_twice_stops_the_job_at_once(calling):
    process, family = calling("for n in (2, 15): signal.signal(n, signal.SIG_IGN)")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("hvdrun: Ctrl-C: the rank has 3 s to end")
    time.sleep(2 * ONE_ACT_S)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "hvdrun: Ctrl-C again: killing everything now\n"
    assert process.wait(LIMIT_S) == -signal.SIGINT
    assert not psutil.wait_procs(family, timeout=20)[1]
