"""init checks that the host has enough shared memory before it takes any."""

import pytest

from hvdlite.world.teams.shared_memory import lack_of_memory
from hvdrun.machine.resources import free_memory_bytes

MIB = 1 << 20


def machine(root, available_mib, cgroup="0::/", **files):
    texts = {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {available_mib * 1024} kB\n",
        "proc/self/cgroup": cgroup + "\n",
        **files,
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_enough_memory_is_no_lack(tmp_path):
    assert lack_of_memory(10 * MIB, machine(tmp_path, 20)) is None


def test_more_than_the_host_has_available_is_said_with_both_numbers(tmp_path):
    text = lack_of_memory(30 * MIB, machine(tmp_path, 20))
    assert text is not None
    assert "need 30 MiB" in text
    assert "20 MiB are available on this host" in text
    assert "HVDLITE_BLOCK_BYTES" in text


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "used"),
    [
        ("0::/job/step", "sys/fs/cgroup/job", "memory.max", "memory.current"),
        ("0::/not/mounted/here", "sys/fs/cgroup", "memory.max", "memory.current"),
        (
            "5:memory:/job",
            "sys/fs/cgroup/memory/job",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_what_is_left_below_the_cgroups_limit_counts(tmp_path, cgroup, folder, limit, used):
    files = {f"{folder}/{limit}": str(16 * MIB), f"{folder}/{used}": str(12 * MIB)}
    root = machine(tmp_path, 1000, cgroup, **files)
    assert lack_of_memory(4 * MIB, root) is None
    text = lack_of_memory(5 * MIB, root)
    assert text is not None
    assert "4 MiB are left below the memory limit" in text


@pytest.mark.parametrize(
    ("cgroup", "names", "total"),
    [
        ("0::/", ("memory.max", "memory.current", "memory.stat"), ""),
        (
            "5:memory:/",
            (
                *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
                "memory/memory.stat",
            ),
            "total_",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_files_that_are_cached_take_no_memory_from_anybody(tmp_path, cgroup, names, total):
    statistics = f"anon 7\n{total}inactive_file {3 * MIB}\n{total}active_file {2 * MIB}\n"
    texts = (str(16 * MIB), str(15 * MIB), statistics)
    files = {f"sys/fs/cgroup/{name}": text for name, text in zip(names, texts, strict=True)}
    root = machine(tmp_path, 1000, cgroup, **files)
    assert lack_of_memory(6 * MIB, root) is None
    assert "6 MiB are left below" in str(lack_of_memory(7 * MIB, root))
    assert free_memory_bytes(root) == 6 * MIB
    assert free_memory_bytes(machine(tmp_path, 5, cgroup)) == 5 * MIB
    assert free_memory_bytes(str(tmp_path / "nothing")) is None


def test_a_cgroup_without_a_limit_is_none(tmp_path):
    files = {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "77"}
    assert lack_of_memory(5 * MIB, machine(tmp_path, 1000, **files)) is None
