"""Clocks of several hosts: what is found of them is right within the bound that is stated."""

import json
import random
import time

import pytest
import torch

import hvdlite as hvd
from hvdlite.observe import clocks
from hvdlite.observe.clocks import Offset, between, offset, offsets


def rounds_of(seed, shift, drift, jitter):
    """What rank 0 and a rank with another clock see of barriers, with random delays of messages."""
    random.seed(seed)
    now, mine, other = 0.0, [], []
    for _ in range(clocks.ROUNDS):
        calls = [now + random.expovariate(1 / jitter) for _ in range(2)]
        ends = [max(calls) + 1000 + random.expovariate(1 / jitter) for _ in range(2)]
        mine.append((calls[0], ends[0]))
        other.append(tuple(t * (1 + drift) + shift for t in (calls[1], ends[1])))
        now = max(ends)
    return mine, other


@pytest.mark.parametrize("jitter", [100, 10_000, 1_000_000])
@pytest.mark.parametrize("shift", [0, 5, -3e12])
def test_a_shifted_clock_is_found_within_the_bound(shift, jitter):
    for seed in range(30):
        found = offset(zip(*rounds_of(seed, shift, 0, jitter), strict=True))
        assert abs(found.offset - shift) <= found.error + 1e-3
        assert found.error < 2 * (1000 + jitter)


def test_ranks_on_one_clock_have_one_offset_and_those_on_rank_0s_have_none():
    mine, other = rounds_of(1, 7e9, 0, 1000)
    found = offsets([(0,), (1,), (0,), (1,)], [mine, other, mine, other[::-1]])
    assert found[0] == found[2] == Offset(0, 0)
    assert found[1] == found[3]
    assert abs(found[1].offset - 7e9) <= found[1].error


def test_a_drift_is_found_between_two_measurements():
    shift, drift, later = 4e9, 5e-5, 600e9

    def measured(at):
        mine, other = rounds_of(at, shift, drift, 2000)
        moved = [tuple(t + drift * at for t in pair) for pair in other]
        return at, offset(zip(mine, moved, strict=True))

    start, end = measured(0), measured(later)
    for at in (0, 0.3 * later, later):
        found = between(start, end, at)
        assert abs(found.offset - (shift + drift * at)) <= found.error + 100
        assert found.error < 20_000
    assert between(start, start, 5) == start[1]


def shifted(path, host, shift, drift):
    """The ranks of host 1 have another clock."""
    hvd.init()
    seen, begin = clocks.as_seen, time.monotonic_ns()

    def true(at):
        return round(shift + drift * (at - begin))

    if hvd.cross_rank() == host:
        clocks.as_seen = lambda at: at + true(at)
    try:
        hvd.start_timeline(path)
        started = time.monotonic_ns()
        for i in range(20):
            hvd.allreduce(torch.ones(3), name=f"op {i}")
        time.sleep(0.05)
        stopping = time.monotonic_ns()
        hvd.stop_timeline()
        return true(begin), true(started), true(stopping), true(time.monotonic_ns())
    finally:
        clocks.as_seen = seen


@pytest.mark.ranks
@pytest.mark.hosts("1,1", "2,1")
def test_hosts_with_different_clocks_have_one_clock_in_the_file(world, tmp_path):
    path, shift = tmp_path / "timeline.json", 3_600e9
    truth = world.run(shifted, str(path), 1, shift, 2e-3)[-1]
    events = json.loads(path.read_text())
    told = {
        (event["args"]["when"], event["pid"]): event["args"]
        for event in events
        if event["name"] == "hvdlite_clock"
    }
    last = world.size - 1
    for rank in range(last):
        assert told["start", rank]["offset_us"] == told["end", rank]["error_us"] == 0
    for when, low, high in (("start", *truth[:2]), ("end", *truth[2:])):
        args = told[when, last]
        assert low / 1000 - args["error_us"] <= args["offset_us"] <= high / 1000 + args["error_us"]
    error_us = told["start", last]["error_us"]
    drifted_us = (truth[3] - truth[0]) / 1000
    begun, ends = (
        {
            (event["pid"], event["name"]): event["ts"]
            for event in events
            if event["ph"] == phase and event["name"].startswith("allreduce op")
        }
        for phase in "be"
    )
    for i in range(20):
        name = f"allreduce op {i}"
        latest_call = max(begun[rank, name] for rank in range(world.size))
        for rank in range(world.size):
            assert ends[rank, name] >= latest_call - error_us - drifted_us


def on_one_clock(path):
    hvd.init()
    hvd.start_timeline(path)
    hvd.stop_timeline()


@pytest.mark.ranks(2)
def test_ranks_of_one_host_are_on_one_clock_without_measuring(world, tmp_path):
    path = tmp_path / "timeline.json"
    world.run(on_one_clock, str(path))
    told = [e["args"] for e in json.loads(path.read_text()) if e["name"] == "hvdlite_clock"]
    assert [args["when"] for args in told] == ["start", "start", "end", "end"]
    assert all(args["offset_us"] == args["error_us"] == 0 for args in told)
