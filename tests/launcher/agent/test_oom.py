"""The keeper tells a SIGKILL for lack of memory from any other."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from hvdrun.agent.rank.oom import cgroup_folders, log_names, oom_kills, was_out_of_memory
from tests.harness.needs import lacking
from tests.harness.programs import run_program

MOUNTS = """\
tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
"""


@pytest.mark.parametrize(
    ("cgroups", "first"),
    [
        ("0::/user.slice\n", "/sys/fs/cgroup/unified/user.slice"),
        ("4:memory:/job\n3:cpuset:/x\n0::/\n", "/sys/fs/cgroup/memory/job"),
        ("2:cpu,memory:/job\n", "/sys/fs/cgroup/memory/job"),
    ],
)
def test_the_memory_cgroup_is_found_in_version_1_and_2(cgroups, first):
    assert cgroup_folders(cgroups, MOUNTS)[0] == first


def test_the_mount_itself_is_looked_at_too_as_in_a_container_the_path_is_another_one():
    assert "/sys/fs/cgroup/memory" in cgroup_folders("4:memory:/docker/1234\n", MOUNTS)


def test_a_process_that_somebody_killed_was_not_out_of_memory():
    before = oom_kills()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not log_names(pid)
    assert not was_out_of_memory(pid, before)
    assert was_out_of_memory(pid, before - 1)


@pytest.fixture
def small_group():
    """The folder of a cgroup that has 200 MB."""
    for parent, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        folder = Path(parent, f"hvdlite-{os.getpid()}")
        try:
            folder.mkdir()
            (folder / limit).write_text("200M")
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    lacking("no memory cgroup can be made here")


EATS = """
import os, time
if os.environ["RANK"] == "1":
    print("hungry", flush=True)
    eaten = [b"x" * 2**20 for _ in range(1000)]
time.sleep(60)
"""


@pytest.mark.long
def test_a_rank_that_takes_more_than_there_is_is_reported_as_that(small_group, python):
    inside = f'echo $$ > {small_group}/cgroup.procs; exec "$@"'
    hvdrun = [python.with_name("hvdrun"), "-np", "2", python, "-c", EATS]
    done = run_program(["sh", "-c", inside, "sh", *hvdrun], 60.0)
    assert done.code == 128 + signal.SIGKILL, done
    report = done.stderr[done.stderr.index("hvdrun: rank") :]
    how = "SIGKILL (Killed), sent by the kernel's out-of-memory killer after"
    assert report.startswith(f"hvdrun: rank 1 on localhost was ended by {how}")
