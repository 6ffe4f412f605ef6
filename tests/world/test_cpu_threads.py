"""How the cores of a host are divided among its ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.world.process.cpu_threads import Cores, cpus_per_rank, own_cores, threads_for


def cores(*numbers, cgroup="", quota=None):
    return Cores(frozenset(numbers), frozenset(numbers), cgroup, quota)


def two_threads(*numbers):
    """A mask on a host of four cores, whose second hardware threads are 4 to 7."""
    return Cores(frozenset(numbers), frozenset(number % 4 for number in numbers))


def shares(*local):
    return [threads_for(local, rank) for rank in range(len(local))]


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        pytest.param([cores(*range(8))], [8], id="one rank has them all"),
        pytest.param([cores(*range(8))] * 4, [2] * 4, id="the same mask is divided"),
        pytest.param([cores(*range(8))] * 3, [2] * 3, id="what does not divide is left"),
        pytest.param([cores(0, 1)] * 4, [1] * 4, id="more ranks than cores have one each"),
        pytest.param([cores(0, 1), cores(2, 3)], [2, 2], id="masks of their own are not divided"),
        pytest.param([cores(0, 1), cores(1, 2), cores(3)], [1, 1, 1], id="overlaps only"),
        pytest.param([cores(0, 1, 2), cores(2, 3, 4), cores(4, 5)], [2, 2, 2], id="by a chain"),
        pytest.param([cores(*range(8), quota=2.0)], [2], id="the quota limits"),
        pytest.param([cores(*range(8), quota=4.0)] * 2, [2] * 2, id="a cgroup's ranks share it"),
        pytest.param(
            [cores(0, 1, 2, 3, cgroup="a", quota=3.5), cores(4, 5, 6, 7, cgroup="b", quota=1.5)],
            [3, 1],
            id="cgroups of their own do not",
        ),
        pytest.param([cores(*range(4), quota=0.5)], [1], id="at least one"),
        pytest.param([two_threads(*range(8))] * 2, [2] * 2, id="hardware threads are no cores"),
        pytest.param([two_threads(0, 1), two_threads(4, 5)], [1] * 2, id="nor shared ones"),
    ],
)
def test_only_ranks_whose_masks_overlap_divide_the_cores(local, expected):
    assert shares(*local) == expected


@given(st.lists(st.frozensets(st.integers(0, 7), min_size=1), min_size=1, max_size=6))
def test_the_shares_are_no_more_than_the_cores_unless_each_has_one(masks):
    found = shares(*(cores(*mask) for mask in masks))
    union = frozenset().union(*masks)
    assert all(1 <= share <= len(mask) for share, mask in zip(found, masks, strict=True))
    # Ranks that outnumber the cores they overlap on have one each all the same.
    assert sum(share for share in found if share > 1) <= len(union)


@pytest.mark.parametrize(
    ("files", "path", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, "0::/", None),
        ({"sys/fs/cgroup/job/cpu.max": "200000 100000"}, "0::/job/step", 2.0),
        ({"sys/fs/cgroup/cpu.max": "100000 100000"}, "0::/docker/not-mounted-here", 1.0),
        (
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
            },
            "2:cpu,cpuacct:/job",
            4.0,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, "1:cpu:/", None),
        ({}, "0::/", None),
    ],
)
def test_the_quota_is_that_of_the_tightest_cgroup(tmp_path, files, path, quota):
    for name, text in {"proc/self/cgroup": path, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert own_cores(str(tmp_path)).quota == quota


def test_ranks_have_hardware_threads_to_spare_bound_or_not():
    assert cpus_per_rank([cores(*range(8))] * 2, 0) == 4
    assert cpus_per_rank([cores(*range(4)), cores(*range(4, 8))], 1) == 4
    assert cpus_per_rank([cores(0, 1)] * 4, 3) == 0.5
