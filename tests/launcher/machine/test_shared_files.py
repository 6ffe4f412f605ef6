"""What ranks leave in /dev/shm, and who removes it."""

import mmap
import os
import subprocess
import sys
import uuid

import pytest

from hvdrun.machine import shared_memory
from hvdrun.machine.shared_memory import SharedFiles, mpichs_names

FOLDER = shared_memory.FOLDER


@pytest.fixture
def made():
    """made(name): a file in /dev/shm; it is removed at the end."""
    paths = []

    def make(name):
        path = f"{FOLDER}/{name}"
        paths.append(path)
        with open(path, "xb") as file:
            file.write(bytes(8192))
        return path

    yield make
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


def test_mpich_names_its_files_so():
    """As seen under MPICH 5.0.2."""
    assert mpichs_names(b"kvs_31662_0_625598871_vm")[0] == "mpich_shm_3e455353_"


def test_the_files_of_the_job_are_removed_and_no_others(made):
    job = uuid.uuid4().hex.encode()
    shm, vci = mpichs_names(job)
    own = [made(shm + "0"), made(shm + "1"), made(vci + "0")]
    others = [made(shm[:-1] + "a_0"), made(mpichs_names(job + b"x")[0] + "0")]
    SharedFiles().remove(b"")
    assert all(map(os.path.exists, own))
    SharedFiles().remove(job)
    assert not any(map(os.path.exists, own))
    assert all(map(os.path.exists, others))


def test_what_a_rank_has_mapped_is_found_and_removed(made):
    path = made(f"sm_segment.test.{os.getpid()}")
    other = made(f"of_the_user.{os.getpid()}")
    with open(path, "r+b") as file, open(other, "r+b") as second:
        memory = mmap.mmap(file.fileno(), 4096), mmap.mmap(second.fileno(), 4096)
        files = SharedFiles()
        files.look(os.getpid())
    assert len(memory) == 2
    files.remove(b"")
    assert not os.path.exists(path)
    assert os.path.exists(other)


HOLDS = "import sys; file = open(sys.argv[1], 'rb'); print('up', flush=True); sys.stdin.read()"


def test_old_files_of_mpi_are_those_that_no_process_holds(made):
    name = f"mpich_shm_test{os.getpid()}_0"
    path = made(name)
    made(f"of_the_user.{os.getpid()}")
    found = shared_memory.facts()
    assert name in found["leftovers"]
    assert found["leftover_bytes"] >= 8192
    assert not [name for name in found["leftovers"] if name.startswith("of_the_user")]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"up\n"
        assert name not in shared_memory.leftovers()
        holder.stdin.close()
    assert name in shared_memory.leftovers()
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    assert name not in shared_memory.leftovers()
    memory.close()


@pytest.mark.parametrize(
    ("free_bytes", "size_bytes", "full"),
    [
        (0, 64 << 20, True),
        (7 << 20, 64 << 20, True),
        (9 << 20, 64 << 20, False),
        (1 << 20, 2 << 20, False),
        (0, 0, False),  # there is none
    ],
)
def test_it_counts_as_full_with_little_left(free_bytes, size_bytes, full):
    assert shared_memory.is_full(free_bytes, size_bytes) == full
