"""hvdrun where /dev/shm is small or full, for real, under both MPIs. Each test has its own."""

import os
import shutil
import textwrap

import pytest

from tests.harness.needs import lacking
from tests.harness.programs import run_program

LIMIT_S = 60.0
KIB, MIB = 1 << 10, 1 << 20
SETUP = (
    'mount -t tmpfs -o size={size} tmpfs /dev/shm; {before}; "$@"; code=$?; ls /dev/shm; exit $code'
)


@pytest.fixture
def job(python):
    """job(size_bytes, *arguments): hvdrun with a /dev/shm of that size; at the end, stdout has the
    names of the files in it."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        lacking("a /dev/shm of its own needs root and unshare")

    def run(size_bytes, *arguments, before=":"):
        setup = SETUP.format(size=size_bytes, before=before)
        hvdrun = [python.with_name("hvdrun"), *arguments]
        return run_program(["unshare", "--mount", "sh", "-c", setup, "sh", *hvdrun], LIMIT_S)

    return run


MEET = """
    import os
    from mpi4py import MPI
    c = MPI.COMM_WORLD
    data = [bytes(100_000)] * c.size
    assert c.alltoall(data) == data
    if c.rank == 0:
        print(c.size, {name: os.environ[name] for name in os.environ if name in %s})
"""
SET = ("UCX_TLS", "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS")


def script(text):
    return ("-c", textwrap.dedent(text))


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [
        (32 * MIB, "{}"),
        (6 * MIB, "{'UCX_TLS': '^sm'}"),
        (512 * KIB, "{'UCX_TLS': '^sm', 'MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS': '8'}"),
    ],
)
def test_mpich_works_with_little_shared_memory(job, python, size_bytes, words):
    done = job(size_bytes, "-np", "3", python, *script(MEET % (SET,)))
    assert (done.code, done.stdout) == (0, f"[0] 3 {words}\n"), done
    assert ("hvdrun: localhost: 0.5 MiB of 0.5 MiB are free" in done.stderr) == (size_bytes < MIB)


@pytest.mark.parametrize("python", ["openmpi"], indirect=True)
@pytest.mark.parametrize(("size_bytes", "is_said"), [(32 * MIB, False), (64 * KIB, True)])
def test_open_mpi_works_with_little_shared_memory(job, python, size_bytes, is_said):
    done = job(size_bytes, "-np", "3", python, *script(MEET % (SET,)))
    assert (done.code, done.stdout) == (0, "[0] 3 {}\n"), done
    assert ("its ranks use TCP within the host" in done.stderr) == is_said
    assert "not enough space" not in done.stderr


OLD = "mpich_shm_0_0"


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_where_mpich_cannot_work_nothing_is_started_and_old_files_are_named(job):
    fill = f"head -c {900 * KIB} /dev/zero > /dev/shm/{OLD}"
    done = job(MIB, "-np", "3", "echo", "started", before=fill)
    assert (done.code, done.stdout) == (71, f"{OLD}\n"), done
    assert "0.1 MiB of 1 MiB are free in /dev/shm, and MPICH needs 0.4 MiB there" in done.stderr
    assert (
        f"1 file of your earlier jobs, which no process uses, takes 0.9 MiB: rm /dev/shm/{OLD};"
        in (done.stderr)
    )


OVERFLOWS = """
    import mmap, os
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 1:
        with open("/dev/shm/data", "w+b") as file:
            file.truncate(1 << 30)
            memory = mmap.mmap(file.fileno(), 1 << 30)
            for at in range(0, 1 << 30, 4096):
                memory[at] = 1
    MPI.COMM_WORLD.Barrier()
"""


def test_a_rank_that_fills_the_shared_memory_is_told_what_ended_it(job, python):
    done = job(32 * MIB, "-np", "2", python, *script(OVERFLOWS))
    assert (done.code, done.stdout) == (135, "data\n"), done
    assert (
        "rank 1 on localhost was ended by SIGBUS (Bus error) beside a full /dev/shm" in done.stderr
    )
    assert "of 32 MiB used) after" in done.stderr
    assert "--shm-size=1g" in done.stderr


DIES = """
    import os
    from mpi4py import MPI
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_die_right_after_mpi_init_leave_no_file(job, python, ranks):
    done = job(64 * MIB, "-np", str(ranks), python, *script(DIES))
    assert (done.code, done.stdout) == (137, ""), done


@pytest.mark.parametrize("python", ["mpich"], indirect=True)  # Open MPI ends them
def test_ranks_that_leave_with_0_and_without_mpi_finalize_leave_no_file(job, python):
    done = job(
        64 * MIB,
        "-np",
        "2",
        python,
        *script(DIES.replace("os.kill(os.getpid(), 9)", "os._exit(0)")),
    )
    assert (done.code, done.stdout) == (0, ""), done
