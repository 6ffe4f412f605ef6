"""What hvdrun says and leaves where it lacks processes, open files, memory or temporary files."""

import errno
import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from hvdrun.errors import LacksResource
from hvdrun.reports.lacking import check_temporary_folder, in_words, of
from tests.harness.needs import lacking
from tests.harness.programs import run_program

LIMIT_S = 60.0
FOREVER = ("sh", "-c", "exec sleep 60")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EAGAIN, "x"), "hvdrun can't start any more processes or threads"),
        (OSError(errno.EMFILE, "x"), "hvdrun can't open any more files (`ulimit -n` is"),
        (OSError(errno.ENOMEM, "x"), "hvdrun gets no more memory"),
        (RuntimeError("can't start new thread"), "hvdrun can't start any more processes"),
        (MemoryError(), "hvdrun gets no more memory"),
        (OSError(errno.ENOSPC, "No space left", "/tmp/x"), "/tmp/x: No space left\n"),
    ],
    ids=str,
)
def test_what_the_system_refuses_is_an_error_of_its_own(error, words):
    assert words in str(of(error))


@pytest.mark.parametrize("error", [OSError(errno.EPERM, "x"), RuntimeError("x"), KeyError("x")])
def test_any_other_exception_is_not(error):
    assert of(error) is None


def test_mpiruns_words_tell_what_it_lacks():
    said = ["[warn] evutil_make_internal_pipe_: pipe: Too many open files", "PMIX ERROR"]
    assert "mpirun can't open any more files" in str(in_words("mpirun", said))
    assert in_words("mpirun", ["an error", ""]) is None


def test_the_folder_for_temporary_files_is_tried_and_nothing_stays_in_it(tmp_path):
    check_temporary_folder({"TMPDIR": str(tmp_path)})
    assert not list(tmp_path.iterdir())
    with pytest.raises(LacksResource, match=r"none \(TMPDIR\): No such file"):
        check_temporary_folder({"TMPDIR": f"{tmp_path}/none"})


# ------------------------------------------------------------ for real


@pytest.fixture
def limited(python, request):
    """limited(setup, *arguments): hvdrun after that line of shell, with /tmp and /dev/shm of its
    own; at the end, stdout has the names of the files in both."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        lacking("a /tmp of its own needs root and unshare")
    mounts = "mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm"

    def run(setup, *arguments):
        lines = f'{mounts}; ({setup}; exec "$@"); code=$?; ls -A /tmp /dev/shm; exit $code'
        hvdrun = [python.with_name("hvdrun"), *arguments]
        return run_program(["unshare", "--mount", "sh", "-c", lines, "sh", *hvdrun], LIMIT_S)

    return run


NOTHING_LEFT = "/dev/shm:\n\n/tmp:\n"


@pytest.mark.parametrize("limit", [6, 12, 20, 64])
def test_with_a_low_hard_limit_of_open_files_the_error_says_so(limited, limit):
    done = limited(f"ulimit -n {limit}", "-np", "32", "-H", "localhost:32", *FOREVER)
    assert done.code == 76, done
    assert done.stdout == NOTHING_LEFT
    assert done.stderr.startswith("hvdrun: ")
    assert "open" in done.stderr
    assert "files" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_low_soft_limit_is_raised_for_mpi_and_not_for_the_ranks(limited):
    done = limited("ulimit -Sn 40", "-np", "8", "-H", "localhost:8", "sh", "-c", "ulimit -Sn")
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()[:8]) == [f"[{rank}] 40" for rank in range(8)]
    assert done.stdout.endswith(NOTHING_LEFT)


@pytest.fixture
def pids():
    """A cgroup for processes: its folder."""
    folder = Path("/sys/fs/cgroup/pids")
    if not folder.is_dir():
        folder = Path("/sys/fs/cgroup")
    group = folder / f"hvdrun-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "pids.max").write_text("max")
    except OSError as error:
        lacking(f"a cgroup that limits processes can't be made: {error}")
    yield group
    group.rmdir()


@pytest.mark.parametrize("most", [1, 2, 4, 8, 12])
def test_with_few_processes_the_error_names_the_limit(limited, pids, most):
    enter = f"echo 0 > {pids}/cgroup.procs; echo {most} > {pids}/pids.max"
    done = limited(enter, "-np", "4", "-H", "localhost:4", *FOREVER)
    assert done.code == 76, done
    assert done.stdout == NOTHING_LEFT
    assert f"{pids.name}/pids.max is {most}, of which" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("python", ["openmpi"], indirect=True)  # MPICH needs no such folder
@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("mount -o remount,ro /tmp", "written to /tmp: Read-only file system"),
        ("mount -o remount,nr_inodes=1 /tmp", "written to /tmp: No space left on device"),
        ("export TMPDIR=/tmp/none", "written to /tmp/none (TMPDIR): No such file"),
        (
            "mount -o remount,nr_inodes=3 /tmp",
            "mpirun: No space left on device\n    remove old files",
        ),
    ],
)
def test_without_room_for_temporary_files_the_error_says_so(limited, setup, words):
    done = limited(setup, "-np", "2", "-H", "localhost:2", *FOREVER)
    assert (done.code, done.stdout) == (76, NOTHING_LEFT), done
    assert words in done.stderr


@pytest.mark.parametrize("python", ["openmpi"], indirect=True)
@pytest.mark.parametrize(
    ("free_kib", "words"),
    [(0, "written to /tmp: No space left on device"), (8, "mpirun: No space left on device")],
)
def test_a_folder_for_temporary_files_that_is_full_is_named(limited, free_kib, words):
    fill = f"mount -o remount,size=64k /tmp; head -c {64 - free_kib}K /dev/zero > /tmp/filler"
    done = limited(fill, "-np", "2", "-H", "localhost:2", *FOREVER)
    assert (done.code, done.stdout) == (76, f"{NOTHING_LEFT}filler\n"), done
    assert words in done.stderr


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_mpich_does_without_temporary_files(limited):
    done = limited("mount -o remount,ro /tmp", "-np", "2", "-H", "localhost:2", "true")
    assert (done.code, done.stdout) == (0, NOTHING_LEFT), done


# By one rank: where all abort at the same time, MPICH sometimes crashes.
ABORTS = """
import time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    MPI.COMM_WORLD.Abort(3)
time.sleep(60)
"""


def test_an_abort_leaves_no_file(limited, python):
    done = limited("true", "-np", "2", python, "-c", ABORTS)
    assert done.code == 3, done
    assert done.stdout.endswith(NOTHING_LEFT)


# With a little more, Python itself sometimes ends in the middle of an import.
@pytest.mark.parametrize("kib", [18_000])
def test_without_memory_there_is_no_traceback(python, kib):
    done = subprocess.run(
        [
            "sh",
            "-c",
            f'ulimit -v {kib}; exec "$@"',
            "sh",
            python,
            "-m",
            "hvdrun",
            "-np",
            "2",
            "true",
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode not in (0, 1), done
    assert "Traceback" not in done.stderr
