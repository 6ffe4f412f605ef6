"""Whether there is memory for what the ranks of a host share, before it is taken."""

import pytest

from hvdlite.shared_memory import lack_of_memory

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
    return root


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


def test_a_cgroup_without_a_limit_is_none(tmp_path):
    files = {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "77"}
    assert lack_of_memory(5 * MIB, machine(tmp_path, 1000, **files)) is None
