"""What is pure: roles, partitioners, parts, clocks and rounds."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.asynchronous.clocks import Clocks, Rounds
from hvdlite.asynchronous.parts import cut, deal
from hvdlite.errors import LaunchError
from hvdlite.world.teams.placement import Placement
from hvdlite.world.teams.roles import roles_of


def placement(*counts):
    hosts, begin = [], 0
    for count in counts:
        hosts.append(tuple(range(begin, begin + count)))
        begin += count
    return Placement(0, tuple(hosts), tuple(f"host{i}" for i in range(len(hosts))))


@pytest.mark.parametrize(
    ("counts", "servers", "expected"),
    [
        ((4,), 1, (3,)),
        ((6,), 2, (4, 5)),
        ((3, 3), 1, (5,)),
        ((3, 3), 2, (2, 5)),
        ((3, 1), 3, (1, 2, 3)),
        ((2, 2, 2), 4, (1, 3, 4, 5)),
    ],
)
def test_servers_are_the_last_ranks_of_the_hosts_in_turn(counts, servers, expected):
    roles = roles_of(placement(*counts), servers)
    assert roles.servers == expected
    assert sorted(roles.servers + roles.workers) == list(range(sum(counts)))


def test_a_job_needs_a_worker():
    with pytest.raises(LaunchError, match="HVDLITE_SERVERS=4, but the job has 4 processes"):
        roles_of(placement(2, 2), 4)


shapes = st.lists(st.integers(0, 40), max_size=3)
partitioners = st.one_of(
    st.none(),
    st.builds(hvd.FixedShardsPartitioner, st.integers(1, 9)),
    st.builds(hvd.MinSizePartitioner, st.integers(1, 999), st.integers(1, 9)),
    st.builds(hvd.MaxSizePartitioner, st.integers(1, 999), st.none() | st.integers(1, 9)),
)


@given(st.lists(shapes, max_size=6), partitioners, st.integers(1, 4))
def test_each_element_is_in_one_part_and_parts_do_not_overlap(shapes, partitioner, servers):
    params = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    parts = [
        part
        for index, param in enumerate(params)
        for part in cut(index, str(index), 0, param, partitioner)
    ]
    for layout in deal(parts, servers):
        memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        views = layout.views(memory)
        for part, view in zip(layout.parts, views, strict=True):
            assert part.of(params[part.param]).shape == view.shape
            part.of(params[part.param]).add_(1)
            view += 1
        assert all(bool((view == 1).all()) for view in views)
    assert all(bool((param == 1).all()) for param in params)


@pytest.mark.parametrize(
    ("partitioner", "rows"),
    [
        (hvd.FixedShardsPartitioner(3), [4, 3, 3]),
        (hvd.FixedShardsPartitioner(30), [1] * 10),
        (hvd.MinSizePartitioner(min_shard_bytes=12, max_shards=9), [4, 3, 3]),
        (hvd.MinSizePartitioner(min_shard_bytes=12, max_shards=2), [5, 5]),
        (hvd.MinSizePartitioner(min_shard_bytes=1000, max_shards=2), [10]),
        (hvd.MaxSizePartitioner(max_shard_bytes=12), [3, 3, 2, 2]),
        (hvd.MaxSizePartitioner(max_shard_bytes=1), [1] * 10),
        (hvd.MaxSizePartitioner(max_shard_bytes=12, max_shards=2), [5, 5]),
    ],
)
def test_partitioners_cut_as_they_say(partitioner, rows):
    param = torch.zeros(10, 4, dtype=torch.int8)
    assert [part.shape[0] for part in cut(0, "p", 0, param, partitioner)] == rows


def test_large_parts_go_to_the_server_with_the_fewest_bytes():
    sizes = [10, 60, 20, 30, 30]
    parts = [p for i, n in enumerate(sizes) for p in cut(i, "", 0, torch.zeros(n), None)]
    layouts = deal(parts, 2)
    assert [[part.param for part in layout.parts] for layout in layouts] == [[1, 2], [0, 3, 4]]


@pytest.mark.parametrize("make", [hvd.FixedShardsPartitioner, hvd.MaxSizePartitioner])
@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_partitioner_refuses_what_is_no_number(make, number):
    with pytest.raises(ValueError, match="expected a whole number, at least 1"):
        make(number)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 2**32))
def test_no_worker_goes_on_before_the_bound_holds(workers, staleness, seed):
    """Workers step, join and wait in any order. The oracle counts steps on its own, and knows the
    invariant only."""
    draw = random.Random(seed)
    clocks = Clocks(workers)
    made, computing, joined = [0] * workers, [True] * workers, [False] * workers
    for _ in range(200):
        free = [w for w in range(workers) if computing[w] and not joined[w]]
        waiting = [w for w in range(workers) if not computing[w]]
        assert free or all(joined), "nobody can go on"
        if all(joined):
            break
        worker = draw.choice(free)
        if draw.random() < 0.02:
            joined[worker] = True
            over = clocks.join(worker)
            assert over == all(joined)
        else:
            made[worker] += 1
            clocks.step(worker)
            computing[worker] = False
            waiting.append(worker)
        slowest = min((m for m, j in zip(made, joined, strict=True) if not j), default=None)
        for worker in waiting:
            may = clocks.holds(made[worker] - staleness)
            assert may == (slowest is None or slowest >= made[worker] - staleness)
            computing[worker] = may
    if all(joined):
        assert clocks.made == [max(made)] * workers
        assert clocks.counted() == list(range(workers))


def test_who_has_left_does_not_hold_up_the_others():
    clocks = Clocks(3)
    clocks.step(0)
    assert not clocks.holds(1)
    clocks.join(1)
    assert not clocks.leave(2)
    assert clocks.holds(1)
    assert clocks.join(0)  # 1 has joined, and 2 is gone
    assert clocks.made == [1, 1, 0]
    assert clocks.slowest() == 1


def test_a_round_takes_the_fastest_and_drops_the_late():
    rounds = Rounds(3, 2)
    assert rounds.give(2, 0)
    assert not rounds.is_complete([0, 1, 2])
    assert rounds.give(0, 0)
    assert rounds.is_complete([0, 1, 2])
    assert rounds.finish() == [0, 2]
    assert not rounds.give(1, 0)
    assert rounds.dropped == 1
    assert rounds.give(1, 1)
    assert rounds.is_complete([1])  # the others have joined
    with pytest.raises(ValueError, match="worker 1 gives gradients of round 1"):
        rounds.give(1, 1)
