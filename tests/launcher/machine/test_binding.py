"""Which cores each rank gets, on the topologies of real hosts as their /sys shows them."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.machine.binding import chosen_by_user, cpu_share, divide, thread_variables
from hvdrun.machine.environment import inheritable
from hvdrun.machine.resources import Core, are_alike, cores, parse_list

# Per host: socket, NUMA node, L3 cache and hardware threads of each group of cores. '+n' is the
# distance of a core's second thread.
HOSTS = {
    # A laptop of four cores, whose two threads are neighbours in number.
    "laptop": [(0, 0, "0-7", "0 2 4 6", 1)],
    # Two sockets that share the numbers out by turns, as some vendors' firmware does.
    "by turns": [
        (0, 0, "0,2,4,6,8,10,12,14", "0 2 4 6", 8),
        (1, 1, "1,3,5,7,9,11,13,15", "1 3 5 7", 8),
    ],
    # Two sockets of 64 cores as four NUMA nodes each; the second threads come after all cores.
    "eight nodes": [
        (
            node // 4,
            node,
            f"{first}-{first + 3},{first + 128}-{first + 131}",
            " ".join(map(str, range(first, first + 4))),
            128,
        )
        for node in range(8)
        for first in range(16 * node, 16 * node + 16, 4)
    ],
    # A virtual machine: cores and nothing else.
    "guest": [(0, 0, "", "0 1 2 3 4 5", 0)],
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """A folder with the /sys of each host."""
    found = {}
    for host, groups in HOSTS.items():
        root = found[host] = tmp_path_factory.mktemp(host.replace(" ", "-"))
        nodes: dict[int, list[int]] = {}
        for socket, node, cache, firsts, distance in groups:
            for core in map(int, firsts.split()):
                threads = [core, core + distance] if distance else [core]
                nodes.setdefault(node, []).extend(threads)
                for cpu in threads:
                    folder = root / f"sys/devices/system/cpu/cpu{cpu}"
                    siblings = ",".join(map(str, threads))
                    write(folder / "topology/thread_siblings_list", siblings)
                    write(folder / "topology/physical_package_id", str(socket))
                    if cache:
                        write(folder / "cache/index3/shared_cpu_list", cache)
        for node, cpus in nodes.items():
            path = root / f"sys/devices/system/node/node{node}/cpulist"
            write(path, ",".join(map(str, cpus)))
    return found


def shares_of(root, usable, ranks):
    """The hardware threads of each rank."""
    found = cores(parse_list(usable), str(root))
    return [sorted(cpu for core in share for cpu in core.cpus) for share in divide(found, ranks)]


def lists(*texts):
    return [sorted(parse_list(text)) for text in texts]


NODES = [f"{16 * n}-{16 * n + 15},{16 * n + 128}-{16 * n + 143}" for n in range(8)]


@pytest.mark.parametrize(
    ("host", "usable", "ranks", "expected"),
    [
        ("laptop", "0-7", 1, ["0-7"]),
        ("laptop", "0-7", 2, ["0-3", "4-7"]),
        ("laptop", "0-7", 4, ["0-1", "2-3", "4-5", "6-7"]),
        ("laptop", "0-7", 3, ["0-1", "2-3", "4-7"]),
        pytest.param("laptop", "0-7", 5, ["0-7"] * 5, id="laptop-more ranks than cores"),
        pytest.param("laptop", "0,2,4", 2, ["0", "2,4"], id="laptop-first threads only"),
        pytest.param("laptop", "1-4", 2, ["1", "2-4"], id="laptop-half of a core"),
        ("by turns", "0-15", 2, ["0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15"]),
        pytest.param(
            "by turns",
            "0-15",
            3,
            ["0,2,8,10", "4,6,12,14", "1,3,5,7,9,11,13,15"],
            id="by turns-nobody crosses sockets where each has two cores all the same",
        ),
        pytest.param(
            "by turns",
            "0-2,4,6,8-10,12,14",
            2,
            ["0,2,8,10", "1,4,6,9,12,14"],
            id="by turns-even comes before near",
        ),
        ("eight nodes", "0-255", 2, [",".join(NODES[:4]), ",".join(NODES[4:])]),
        ("eight nodes", "0-255", 8, NODES),
        pytest.param(
            "eight nodes",
            "0-255",
            16,
            [f"{first}-{first + 7},{first + 128}-{first + 135}" for first in range(0, 128, 8)],
            id="eight nodes-two ranks a node, each with two caches of its own",
        ),
        pytest.param(
            "eight nodes",
            "0-127",
            5,
            ["0-24", "25-50", "51-75", "76-101", "102-127"],
            id="eight nodes-five ranks, without second threads",
        ),
        pytest.param(
            "eight nodes",
            "16-31,112-127",
            2,
            ["16-31", "112-127"],
            id="eight nodes-a container's cpuset",
        ),
        ("guest", "0-5", 4, ["0", "1-2", "3", "4-5"]),
        ("guest", "2-3", 2, ["2", "3"]),
    ],
)
def test_each_rank_gets_its_share_of_the_cores_near_each_other(
    roots, host, usable, ranks, expected
):
    assert shares_of(roots[host], usable, ranks) == lists(*expected)


locations = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))


@given(st.lists(locations, min_size=1, max_size=24), st.integers(1, 24))
def test_the_cores_are_given_out_evenly_and_once(where, ranks):
    host = [Core(frozenset({i, i + 100}), at) for i, at in enumerate(sorted(where))]
    shares = divide(host, ranks)
    assert len(shares) == ranks
    if ranks > len(host):
        assert all(share == host for share in shares)
        return
    given_out = [core for share in shares for core in share]
    assert sorted(map(id, given_out)) == sorted(map(id, host))
    assert min(map(len, shares)) == len(host) // ranks


@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))
def test_on_an_even_host_nobody_crosses_and_no_core_is_idle(sockets, nodes, per_node, per_rank):
    host = [
        Core(frozenset({number}), (number // (nodes * per_node), number // per_node, 0))
        for number in range(sockets * nodes * per_node)
    ]
    if per_node % per_rank:
        return
    shares = divide(host, len(host) // per_rank)
    assert all(len({core.location for core in share}) == 1 for share in shares)
    assert sum(map(len, shares)) == len(host)


def guest(count):
    return [Core(frozenset({cpu}), (0, 0, 0)) for cpu in range(count)]


@pytest.mark.parametrize(
    ("count", "alike", "quota", "ranks", "cpus", "threads"),
    [
        pytest.param(8, True, None, 2, {0, 1, 2, 3}, 4, id="as many threads as cores"),
        pytest.param(8, True, None, 1, None, 8, id="a single rank keeps what it has"),
        pytest.param(2, True, None, 5, None, 1, id="more ranks than cores"),
        pytest.param(8, True, 3.5, 2, {0, 1, 2, 3}, 1, id="the ranks share a container's quota"),
        pytest.param(8, True, 0.5, 1, None, 1, id="at least one"),
        pytest.param(8, False, None, 2, None, 4, id="cores of two kinds are not divided"),
    ],
)
def test_the_threads_match_the_cores(count, alike, quota, ranks, cpus, threads):
    found = cpu_share(guest(count), alike, quota, 0, ranks)
    assert found.cpus == cpus
    assert found.threads == threads


def test_cores_of_two_kinds_are_known_by_what_the_kernel_says(tmp_path):
    assert are_alike({0, 1}, str(tmp_path))
    write(tmp_path / "sys/devices/cpu_atom/cpus", "8-15")
    assert not are_alike(range(16), str(tmp_path))
    assert are_alike(range(8), str(tmp_path))
    assert are_alike(range(8, 16), str(tmp_path))
    for cpu, capacity in ((0, 1024), (1, 446)):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    assert not are_alike({0, 1}, str(tmp_path))


def test_this_hosts_cores_are_those_that_lscpu_counts():
    said = subprocess.run(
        ["lscpu", "-p=CPU,CORE,SOCKET"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(",") for line in said.splitlines() if not line.startswith("#")]
    usable = os.sched_getaffinity(0)
    of_lscpu: dict[tuple[str, str], set[int]] = {}
    for cpu, core, socket in rows:
        if int(cpu) in usable:
            of_lscpu.setdefault((core, socket), set()).add(int(cpu))
    assert {core.cpus for core in cores(usable)} == set(map(frozenset, of_lscpu.values()))


def test_a_number_of_threads_that_the_user_chose_stands():
    assert thread_variables(4, {}) == {"OMP_NUM_THREADS": "4", "HVDRUN_THREADS": "4"}
    assert thread_variables(4, {"OMP_NUM_THREADS": "2"}) == {}
    assert thread_variables(4, {"MKL_NUM_THREADS": "2"}) == {}
    assert "OMP_NUM_THREADS" in thread_variables(4, {"OMP_NUM_THREADS": ""})


def test_what_hvdrun_has_chosen_is_not_taken_for_the_users():
    ours = thread_variables(4, {})
    assert not chosen_by_user(ours)
    assert chosen_by_user({**ours, "MKL_NUM_THREADS": "1"})
    assert inheritable({**ours, "A": "b"}) == {"A": "b"}
    assert inheritable({"OMP_NUM_THREADS": "4"}) == {"OMP_NUM_THREADS": "4"}
