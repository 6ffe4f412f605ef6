"""The limits of a process: cgroups that stop it, processes and open files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrun.machine.limits import refused_processes, room_for_processes, throttling


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


STAT_V2 = (
    "usage_usec 5\nuser_usec 4\nsystem_usec 1\nnr_periods 40\nnr_throttled 7\nthrottled_usec 90"
)
STAT_V1 = "nr_periods 12\nnr_throttled 3\nthrottled_time 1000"


@pytest.mark.parametrize(
    ("cgroup", "files", "found"),
    [
        (
            "0::/job/rank",
            {f"{FOLDER}/job/cpu.stat": STAT_V2, f"{FOLDER}/cpu.stat": "usage_usec 9"},
            {f"{FOLDER}/job": (40, 7, 5e-6)},
        ),
        (
            "3:cpu,cpuacct:/job\n2:memory:/other",
            {
                f"{FOLDER}/cpu/job/cpu.stat": STAT_V1,
                f"{FOLDER}/cpu/cpu.stat": STAT_V1.replace("3", "0"),
            },
            {f"{FOLDER}/cpu/job": (12, 3, None), f"{FOLDER}/cpu": (12, 0, None)},
        ),
        (
            "3:cpu,cpuacct:/job",
            {
                f"{FOLDER}/cpu/job/cpu.stat": STAT_V1,
                f"{FOLDER}/cpu/job/cpuacct.usage": "3000000000",
            },
            {f"{FOLDER}/cpu/job": (12, 3, 3.0)},
        ),
        (
            "4:cpuacct:/job/rank\n3:cpu:/job",
            {
                f"{FOLDER}/cpu/job/cpu.stat": STAT_V1,
                f"{FOLDER}/cpuacct/job/cpuacct.usage": "2000000000",
            },
            {f"{FOLDER}/cpu/job": (12, 3, 2.0)},
        ),
        (  # what others use there is not its own
            "4:cpuacct:/other\n3:cpu:/job",
            {
                f"{FOLDER}/cpu/job/cpu.stat": STAT_V1,
                f"{FOLDER}/cpuacct/job/cpuacct.usage": "2000000000",
            },
            {f"{FOLDER}/cpu/job": (12, 3, None)},
        ),
        ("0::/job", {f"{FOLDER}/job/cpu.stat": "nr_periods many\nnr_throttled\n\nx y z"}, {}),
        ("", {}, {}),
    ],
)
def test_each_cgroup_with_a_quota_tells(machine, cgroup, files, found):
    root = machine(cgroup, files)
    expected = {f"{root}/{folder}": counts for folder, counts in found.items()}
    told = throttling(root=root)
    assert {folder: counts[:3] for folder, counts in told.items()} == expected


BURNS = """
import os, sys
from pathlib import Path
from hvdrun.machine.limits import throttling

folder = Path(sys.argv[1])
(folder / "cgroup.procs").write_text(str(os.getpid()))
found = 0, 0
while found[1] < 3:
    found = {Path(each).name: counts for each, counts in throttling().items()}[folder.name]
print(*found[:2])
"""


@pytest.fixture
def quota():
    """A cgroup of the kernel's whose processes get a hundredth of a core."""
    folder = f"hvdlite-test-{os.getpid()}"
    v1, v2 = Path("/sys/fs/cgroup/cpu", folder), Path("/sys/fs/cgroup", folder)
    made, name, text = v1, "cpu.cfs_quota_us", "1000"
    if not v1.parent.is_dir():
        made, name, text = v2, "cpu.max", "1000 100000"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        try:
            (made / name).write_text(text)
        except OSError as error:
            pytest.skip(f"no quota can be set: {error}")
        yield made
    finally:
        made.rmdir()


def test_the_kernel_tells_of_a_quota_that_is_used_up(quota):
    command = [sys.executable, "-c", BURNS, quota]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    periods, stopped = map(int, done.stdout.split())
    assert periods >= stopped >= 3
    assert quota.name not in {Path(each).name for each in throttling()}
