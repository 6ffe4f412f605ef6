"""How often the kernel has stopped this process because a CPU quota was used up."""

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
            {f"{FOLDER}/job": (40, 7)},
        ),
        (
            "3:cpu,cpuacct:/job\n2:memory:/other",
            {f"{FOLDER}/cpu/job/cpu.stat": V1, f"{FOLDER}/cpu/cpu.stat": V1.replace("3", "0")},
            {f"{FOLDER}/cpu/job": (12, 3), f"{FOLDER}/cpu": (12, 0)},
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
    assert throttling(root=str(tmp_path)) == expected
