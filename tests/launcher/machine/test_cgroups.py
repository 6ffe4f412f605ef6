"""How often the kernel has stopped this process because a CPU quota was used up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrun.machine.cgroups import throttling

V2 = "usage_usec 5\nuser_usec 4\nsystem_usec 1\nnr_periods 40\nnr_throttled 7\nthrottled_usec 90"
V1 = "nr_periods 12\nnr_throttled 3\nthrottled_time 1000"
FOLDER = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("cgroup", "files", "found"),
    [
        (
            "0::/job/rank",
            {f"{FOLDER}/job/cpu.stat": V2, f"{FOLDER}/cpu.stat": "usage_usec 9"},
            {f"{FOLDER}/job": (40, 7, 5e-6)},
        ),
        (
            "3:cpu,cpuacct:/job\n2:memory:/other",
            {f"{FOLDER}/cpu/job/cpu.stat": V1, f"{FOLDER}/cpu/cpu.stat": V1.replace("3", "0")},
            {f"{FOLDER}/cpu/job": (12, 3, None), f"{FOLDER}/cpu": (12, 0, None)},
        ),
        (
            "3:cpu,cpuacct:/job",
            {f"{FOLDER}/cpu/job/cpu.stat": V1, f"{FOLDER}/cpu/job/cpuacct.usage": "3000000000"},
            {f"{FOLDER}/cpu/job": (12, 3, 3.0)},
        ),
        (
            "4:cpuacct:/job/rank\n3:cpu:/job",
            {f"{FOLDER}/cpu/job/cpu.stat": V1, f"{FOLDER}/cpuacct/job/cpuacct.usage": "2000000000"},
            {f"{FOLDER}/cpu/job": (12, 3, 2.0)},
        ),
        (  # what others use there is not its own
            "4:cpuacct:/other\n3:cpu:/job",
            {f"{FOLDER}/cpu/job/cpu.stat": V1, f"{FOLDER}/cpuacct/job/cpuacct.usage": "2000000000"},
            {f"{FOLDER}/cpu/job": (12, 3, None)},
        ),
        ("0::/job", {f"{FOLDER}/job/cpu.stat": "nr_periods many\nnr_throttled\n\nx y z"}, {}),
        ("", {}, {}),
    ],
)
def test_each_cgroup_with_a_quota_tells(tmp_path, cgroup, files, found):
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    expected = {f"{tmp_path}/{folder}": counts for folder, counts in found.items()}
    told = throttling(root=str(tmp_path))
    assert {folder: counts[:3] for folder, counts in told.items()} == expected


BURNS = """
import os, sys
from pathlib import Path
from hvdrun.machine.cgroups import throttling

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
