"""How many messages and bytes the exchanges between up to 64 hosts take: the table of
docs/design/data-path.md, and the cost model."""

from __future__ import annotations

import ctypes

import pytest
import torch

from benchmarks import cost
from tests.core.net.network import (
    ACTIVE,
    CHAIN,
    DIRECT,
    DOUBLING,
    GATHER,
    HALF_DIRECT,
    HALF_RING,
    PAIRWISE,
    RING,
    WHOLES,
    by_algorithm,
    by_few_hosts,
    by_half,
    by_hosts,
    chunks_of_owners,
    gather_case,
    pairwise_case,
    rounds,
    tables_of,
)


def sends_to(hosts, peers_of):
    """A matrix: 1 where a host sends to another, else 0."""
    sends = torch.zeros((hosts, hosts), dtype=torch.int64)
    for host in range(hosts):
        for peer in peers_of(host):
            sends[host, peer] += 1
    return sends


@by_hosts
@pytest.mark.parametrize("segments", [1, 3])
def test_a_ring_sends_two_parts_in_h_of_all_but_one_chunk_to_the_next_host(
    network, hosts, segments
):
    elems = 16 * segments * hosts  # a segment of 64 bytes has 16
    network.run(RING, [torch.ones(elems) for _ in range(hosts)])
    steps = 2 * (hosts - 1)
    to_next = sends_to(hosts, lambda host: [(host + 1) % hosts])
    assert torch.equal(network.messages, steps * segments * to_next)
    assert torch.equal(network.bytes, steps * 4 * elems // hosts * to_next)
    assert network.ticks == steps * segments  # the link is never idle


@by_hosts
@pytest.mark.parametrize("segments", [1, 3])
def test_a_direct_exchange_sends_as_much_to_all_and_waits_twice(network, hosts, segments):
    elems = 16 * segments * hosts
    network.run(DIRECT, [torch.ones(elems) for _ in range(hosts)])
    to_others = sends_to(hosts, lambda host: set(range(hosts)) - {host})
    assert torch.equal(network.messages, 2 * segments * to_others)
    assert torch.equal(network.bytes, 2 * 4 * elems // hosts * to_others)
    assert segments > 1 or network.ticks == 2


@by_hosts
@pytest.mark.parametrize("segments", [1, 3])
def test_half_of_an_exchange_sends_each_chunk_to_its_host_once(network, hosts, segments):
    sizes = [16 * segments] * hosts
    tables = tables_of(sizes, 4)
    network.run(HALF_RING, [torch.ones(sum(sizes)) for _ in range(hosts)], tables=tables)
    to_next = sends_to(hosts, lambda host: [(host + 1) % hosts])
    assert torch.equal(network.messages, (hosts - 1) * segments * to_next)
    assert torch.equal(network.bytes, (hosts - 1) * 64 * segments * to_next)
    assert network.ticks == (hosts - 1) * segments
    network.messages.zero_(), network.bytes.zero_()
    network.run(HALF_DIRECT, [torch.ones(sum(sizes)) for _ in range(hosts)], tables=tables)
    to_others = sends_to(hosts, lambda host: set(range(hosts)) - {host})
    assert torch.equal(network.messages, segments * to_others)
    assert torch.equal(network.bytes, 64 * segments * to_others)
    assert segments > 1 or network.ticks == 1


@by_few_hosts
@pytest.mark.parametrize("segments", [1, 6])
def test_a_ring_in_which_one_host_gets_everything_is_a_chain(network, hosts, segments):
    root = hosts // 2
    sizes = [0] * hosts
    sizes[root] = 16 * segments
    network.run(
        HALF_RING, [torch.ones(sizes[root]) for _ in range(hosts)], tables=tables_of(sizes, 4)
    )
    to_next = sends_to(hosts, lambda host: [(host + 1) % hosts] if host != root else [])
    assert torch.equal(network.messages, segments * to_next)
    assert torch.equal(network.bytes, 64 * segments * to_next)
    assert network.ticks == hosts - 1 + segments - 1


@by_hosts
@pytest.mark.parametrize("segments", [1, 3])
def test_recursive_doubling_sends_the_slice_once_for_each_doubling(network, hosts, segments):
    elems = 16 * segments
    network.run(DOUBLING, [torch.ones(elems) for _ in range(hosts)])
    whole, more = rounds(hosts)

    def peers_of(host):
        if host >= 2**whole:
            return [host - 2**whole]
        folded = [host + 2**whole] if host < more else []
        return [host ^ 2**k for k in range(whole)] + folded

    sends = sends_to(hosts, peers_of)
    assert torch.equal(network.messages, segments * sends)
    assert torch.equal(network.bytes, 4 * elems * sends)
    assert segments > 1 or network.ticks == whole + (2 if more else 0)


@by_few_hosts
@pytest.mark.parametrize("segments", [1, 6])
def test_a_chain_sends_each_byte_to_the_next_host_and_segments_follow_each_other(
    network, hosts, segments
):
    root = hosts // 2
    network.run(CHAIN, [torch.ones(16 * segments) for _ in range(hosts)], root=root)
    last = (root - 1) % hosts
    to_next = sends_to(hosts, lambda host: [(host + 1) % hosts] if host != last else [])
    assert torch.equal(network.messages, segments * to_next)
    assert torch.equal(network.bytes, 64 * segments * to_next)
    assert network.ticks == hosts - 1 + segments - 1


@by_few_hosts
def test_a_gather_hands_all_parts_but_one_to_the_next_host(network, hosts):
    buffers, tables, _ = gather_case(hosts, [128] * hosts)
    network.run(GATHER, buffers, tables=tables)
    to_next = sends_to(hosts, lambda host: [(host + 1) % hosts])
    assert torch.equal(network.messages, 2 * (hosts - 1) * to_next)
    assert torch.equal(network.bytes, 128 * (hosts - 1) * to_next)


@by_hosts
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize(("algorithm", "half"), WHOLES.values(), ids=WHOLES)
def test_sharded_training_sends_what_the_model_counts_before_and_after_the_update(
    network, hosts, algorithm, half, segments
):
    count = 16 * segments * hosts
    job = cost.Job(hosts, 1, 4 * count)
    scale = cost.SEGMENT_BYTES / 64  # the model's segments are larger
    scaled = cost.Job(hosts, 1, round(4 * count * scale))
    tables = chunks_of_owners(hosts, count, 4)

    def sent(*algorithms):
        network.messages.zero_(), network.bytes.zero_()
        for one in algorithms:
            network.run(one, [torch.ones(count) for _ in range(hosts)], tables=tables)
        return network.messages.sum(1).tolist(), network.bytes.sum(1).tolist()

    of_whole, of_half, of_gather = sent(algorithm), sent(half), sent(GATHER)
    for sharding in (cost.UNSHARDED, cost.SHARDED_ON_HOST):
        assert cost.messages(scaled, sharding) == (of_whole[0][0], 0)
        assert [cost.sent_before_update(job, sharding)] * hosts == pytest.approx(of_whole[1])
        assert cost.sent_after_update(job, sharding) == 0
    before, after = cost.messages(scaled, cost.SHARDED)
    assert ([before] * hosts, [after] * hosts) == (of_half[0], of_gather[0])
    assert [cost.sent_before_update(job, cost.SHARDED)] * hosts == pytest.approx(of_half[1])
    assert [cost.sent_after_update(job, cost.SHARDED)] * hosts == pytest.approx(of_gather[1])
    assert sum(of_half[1]) <= 0.55 * sum(of_whole[1])


@by_few_hosts
def test_an_alltoall_sends_each_part_once_some_at_a_time(network, hosts):
    inputs, tables, expected, sent = pairwise_case(hosts, lambda a, b: 64 * (a != b))
    network.run(PAIRWISE, [torch.zeros_like(each) for each in expected], inputs, tables)
    assert torch.equal(network.messages, sent // 64)
    assert torch.equal(network.bytes, sent)
    assert network.ticks == -(-(hosts - 1) // ACTIVE)


@by_half
@by_hosts
def test_the_model_counts_the_same_of_half_an_exchange(network, hosts, half):
    elems = 16 * hosts
    tables = tables_of([16] * hosts, 4)
    network.run(half, [torch.ones(elems) for _ in range(hosts)], tables=tables)
    model = cost.half_ring if half == HALF_RING else cost.half_direct
    alphas, _, wire_bytes, _ = model(hosts, 4 * elems)
    assert network.ticks == alphas
    assert network.bytes.sum(1).tolist() == pytest.approx([wire_bytes] * hosts)


COSTS = {RING: cost.ring, DIRECT: cost.direct, DOUBLING: cost.recursive_doubling}


@by_algorithm
@by_hosts
def test_the_model_counts_the_same_messages_that_wait_for_each_other(network, hosts, algorithm):
    elems = 16 * hosts
    # One segment each: 16 float32 of a chunk, or the whole slice.
    segment_bytes = 64 * hosts if algorithm == DOUBLING else 64
    network.run(algorithm, [torch.ones(elems) for _ in range(hosts)], segment_bytes=segment_bytes)
    alphas, _, wire_bytes, _ = COSTS[algorithm](hosts, 4 * elems)
    assert network.ticks == alphas
    if algorithm != DOUBLING:  # there the slice waits for itself, and hosts send it less often
        assert network.bytes.sum(1).tolist() == pytest.approx([wire_bytes] * hosts)


@by_algorithm
@by_few_hosts
def test_an_empty_slice_costs_no_message(network, hosts, algorithm):
    network.run(algorithm, [torch.empty(0) for _ in range(hosts)])
    assert not network.messages.any()
    assert network.ticks == 0


# ---- how long messages are in flight ----


def flight_ms(simulation, in_flight, late_ms, gap_ms, ended):
    simulation.flight_ns.restype = ctypes.c_uint64
    times = [ctypes.c_uint64(round(ms * 1e6)) for ms in (late_ms, gap_ms)]
    return simulation.flight_ns(ctypes.c_uint64(in_flight), *times, ctypes.c_uint64(ended)) / 1e6


@pytest.mark.parametrize("ended", [1, 16, 64, 1000])
def test_messages_are_in_flight_for_as_long_as_as_many_take_to_end(simulation, ended):
    assert flight_ms(simulation, 8, 0, 0.5, ended) == pytest.approx(4, rel=0.02)


def test_a_rank_that_is_late_says_little_of_the_wire(simulation):
    assert flight_ms(simulation, 8, 1000, 0.05, 32) < 1
    assert flight_ms(simulation, 8, 1000, 0.5, 64) == pytest.approx(4, rel=0.1)
