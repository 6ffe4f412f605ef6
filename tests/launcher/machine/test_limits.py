"""How many processes and open files are left, by the limits of this process."""

import os
import subprocess
import sys

import pytest

from hvdrun.machine.limits import refused_processes, room_for_processes


@pytest.fixture
def machine(tmp_path):
    """machine(cgroup, files): a root folder with that /proc/self/cgroup and those files."""

    def make(cgroup, files):
        for name, text in {"proc/self/cgroup": cgroup, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return str(tmp_path)

    return make


FOLDER = "sys/fs/cgroup"
V2 = {
    f"{FOLDER}/job/rank/pids.max": "max",
    f"{FOLDER}/job/rank/pids.current": "3",
    f"{FOLDER}/job/pids.max": "20",
    f"{FOLDER}/job/pids.current": "15",
}
V1 = {f"{FOLDER}/pids/job/pids.max": "8", f"{FOLDER}/pids/job/pids.current": "9"}


@pytest.mark.parametrize(
    ("cgroup", "files", "left", "words"),
    [
        ("0::/job/rank", V2, 5, "/job/pids.max is 20, of which 15 are in use"),
        ("8:pids:/job\n0::/", V1, 0, "/pids/job/pids.max is 8, of which 9 are in use"),
    ],
)
def test_the_tightest_cgroup_counts(machine, cgroup, files, left, words):
    room = room_for_processes(machine(cgroup, files))
    assert room[0] == left
    assert room[1].endswith(words)


def test_processes_that_were_refused_are_counted(machine):
    events = {f"{FOLDER}/job/rank/pids.events": "max 3", f"{FOLDER}/job/pids.events": "max 0"}
    assert refused_processes(machine("0::/job/rank", events)) == 3
    assert refused_processes(machine("0::/other", events)) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="another user may have a limit")
def test_root_without_a_limited_cgroup_has_no_limit(machine):
    assert room_for_processes(machine("0::/", {f"{FOLDER}/pids.max": "max"})) is None


RAISES = """
import resource, sys
from hvdrun.machine.limits import raise_open_files, set_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 50))
limit = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)
print(raise_open_files(15), raise_open_files(30), limit(), raise_open_files(99), limit())
set_open_files(25)
print(limit())
set_open_files(99)
print(limit())
"""


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes_and_set_back():
    done = subprocess.run(
        [sys.executable, "-c", RAISES], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "None 20 (30, 50) 30 (50, 50)\n(25, 50)\n(50, 50)\n"
