"""Lack of memory is told from other reasons for a SIGKILL."""

import os
import signal

import pytest

from hvdrun.memory import cgroup_folders, log_names, oom_kills, was_out_of_memory

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
