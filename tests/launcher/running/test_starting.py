"""Ranks that come late to hvd.init(), or never: what hvdrun says and does, under both MPIs."""

import contextlib
import os
import re
import signal
import subprocess
import textwrap

import pytest

from tests.harness.worlds import ROOT, end_tree

LIMIT_S = 60.0


def script(text):
    return ("-c", textwrap.dedent(text))


@contextlib.contextmanager
def started(python, *arguments, options=()):
    """hvdrun with two ranks of Python, and its stderr to read."""
    process = subprocess.Popen(
        [python.with_name("hvdrun"), "-np", "2", *options, python, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_tree(process)
        process.stderr.close()


LEAVES = """
    import os, sys
    if os.environ["RANK"] == "1":
        sys.exit(0)
    import hvdlite as hvd
    hvd.init()
"""


def test_a_rank_that_ends_with_0_while_others_wait_for_it_in_init_ends_the_job(hvdrun, python):
    done = hvdrun("-np", "3", python, *script(LEAVES))
    assert done.code == 73, done
    assert re.search(
        r"hvdrun: rank 1 on localhost ended with exit code 0 after [\d.]+ s and had not called"
        r" hvd.init\(\), where (ranks 0,2|rank [02]) waited for it\n    every rank must call"
        r" hvd.init\(\)",
        done.stderr,
    ), done


CLOSES = """
    import os, time
    import hvdlite as hvd
    hvd.init()
    if hvd.rank() == 1:
        os.closerange(0, 1000)
        time.sleep(60)
    hvd.barrier()
"""


@pytest.mark.wide_in("mpich")
def test_a_rank_that_closes_its_file_descriptors_and_runs_on_is_named(python):
    with started(python, *script(CLOSES)) as process:
        line = process.stderr.readline()
        assert line.startswith(
            "hvdrun: rank 1 on localhost has closed its file descriptors, MPI's among them, and"
        ), line


@pytest.mark.parametrize("python", ["mpich"], indirect=True)  # Open MPI does not say what is done
def test_a_rank_that_ends_with_0_while_others_wait_for_it_in_mpi_init_ends_the_job(hvdrun, python):
    text = LEAVES.replace("import hvdlite as hvd\n    hvd.init()", "from mpi4py import MPI")
    done = hvdrun("-np", "2", python, *script(text))
    assert done.code == 73, done
    assert "and had not called MPI_Init, where rank 0 waited for it" in done.stderr, done


# Rank 1 does something before it calls init; then it waits for a file.
LATE = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "1":
    {before}
import hvdlite as hvd
hvd.init()
print("in", flush=True)
"""
WAITS = "while not os.path.exists({gate!r}): time.sleep(0.1)"
IMPORTED = f"import hvdlite\n    {WAITS}"
IN_CHILD = "subprocess.run([sys.executable, '-c', 'import time, os\\n' + {waits!r}])"


@pytest.mark.parametrize(
    ("before", "does"),
    [
        (WAITS, r"sleeps( \(.*?\))?: python.* -c .*; it has not imported hvdlite\n"),
        (IMPORTED, r"(sleeps|computes)( \(.*?\))?: python[^;]*\n        <string>:5 in <module>\n"),
        (
            IN_CHILD,
            (
                r"waits for a child process to end( \(.*?\))?: python.*; its child process \d+"
                r" \(python.*\) sleeps"
            ),
        ),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            (
                r"is stopped, for \d+\.\d s now"
                r" \(`kill -CONT (?P<pid>\d+)` there lets it go on\): python.*"
            ),
        ),
    ],
    ids=["sleeps", "imported", "child", "stopped"],
)
@pytest.mark.wide_in("openmpi")
def test_a_rank_that_others_wait_for_in_init_is_described_until_it_comes(
    python, tmp_path, before, does
):
    gate = str(tmp_path / "gate")
    text = LATE.format(before=before.format(gate=gate, waits=WAITS.format(gate=gate)))
    options = ("--stall-check-warning-time-seconds", "1")
    with started(python, "-c", text, options=options) as process:
        seen = ""
        while not (said := re.search(rf"(?m)^    rank 1 on localhost {does}", seen)):
            line = process.stderr.readline()
            seen += line
            # The first reports may come before it has imported what it does next.
            assert line, seen
            assert seen.count("waits in hvd.init()") < 5, seen
        assert re.search(
            r"(?m)^hvdrun: rank 0 waits in hvd\.init\(\) for rank 1, which has not called it"
            r" \(\d+\.\d s so far\):\n    rank 1 on localhost ",
            seen,
        ), seen
        with open(gate, "w"):
            pass
        if "pid" in said.re.groupindex:
            os.kill(int(said["pid"]), signal.SIGCONT)
        rest = process.stderr.read()
        assert "hvdrun: all ranks are in hvd.init(), after" in rest
        assert process.wait(LIMIT_S) == 0, rest


def test_the_stall_shutdown_time_ends_a_wait_in_init(hvdrun, python):
    before = "time.sleep(60)"
    options = ("-np", "3", "--stall-check-shutdown-time-seconds", "1")
    done = hvdrun(*options, python, "-c", LATE.format(before=before))
    assert done.code == 75, done
    # Another may still import torch, as the limit is so short.
    assert re.search(
        r"hvdrun: (rank 1|ranks 0-1|ranks 1-2) on localhost ha(s|ve) not called hvd\.init\(\),"
        r" where rank",
        done.stderr,
    ), done
