"""The exchanges between hosts, up to 64 of them: the core's own state machines over a network in
memory. What comes out."""

from __future__ import annotations

import functools

import pytest
import torch

from hvdlite import _core
from tests.core.net.network import (
    CHAIN,
    DIRECT,
    DOUBLING,
    GATHER,
    HALF_DIRECT,
    PAIRWISE,
    RING,
    WHOLES,
    by_algorithm,
    by_few_hosts,
    by_half,
    by_hosts,
    chunks_of_owners,
    cut,
    gather_case,
    pairwise_case,
    random_floats,
    rounds,
    tables_of,
)


@by_algorithm
@by_hosts
def test_every_host_gets_the_sum_of_all(network, hosts, algorithm):
    for count in (0, 1, hosts - 1, hosts, hosts + 1, 16 * hosts + 1, 251):
        index = torch.arange(count)
        buffers = [(host + hosts * index).to(torch.int32) for host in range(hosts)]
        expected = (hosts * (hosts - 1) // 2 + hosts**2 * index).to(torch.int32)
        network.run(algorithm, buffers, seed=count + 1)
        assert all(torch.equal(buffer, expected) for buffer in buffers), count


@by_algorithm
@by_few_hosts
def test_the_average_is_divided_once_and_the_largest_of_all_is_found(network, hosts, algorithm):
    index = torch.arange(100)
    given = [1000 * host + (index + host) % hosts for host in range(hosts)]
    buffers = [each.clone() for each in given]
    network.run(algorithm, buffers, op=_core.AVERAGE, divisor=hosts, seed=5)
    expected = torch.stack(given).sum(0) // hosts
    assert all(torch.equal(buffer, expected) for buffer in buffers)
    buffers = [(index + host) % hosts for host in range(hosts)]
    network.run(algorithm, buffers, op=_core.MAX, seed=6)
    assert all(torch.equal(buffer, torch.full((100,), hosts - 1)) for buffer in buffers)


def sum_along_the_ring(given):
    """Chunk c begins its way at host c."""
    hosts = len(given)
    chunks = []
    for chunk in range(hosts):
        order = [cut(given[(chunk + step) % hosts], hosts)[chunk] for step in range(hosts)]
        chunks.append(functools.reduce(torch.add, order))
    return torch.cat(chunks)


def sum_in_host_order(given):
    return functools.reduce(torch.add, given)


def sum_of_halves(given):
    """Hosts beyond the largest power of two are added to the first ones; then neighbours, twice as
    many each time."""
    whole, more = rounds(len(given))
    level = [given[host] + given[host + 2**whole] for host in range(more)]
    level += given[more : 2**whole]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


ORDERS = {RING: sum_along_the_ring, DIRECT: sum_in_host_order, DOUBLING: sum_of_halves}


@by_algorithm
@by_hosts
def test_all_hosts_have_the_same_bits_which_are_those_of_the_documented_order(
    network, hosts, algorithm
):
    buffers = random_floats(hosts, 5 * hosts + 3)
    expected = ORDERS[algorithm](buffers)
    buffers = [buffer.clone() for buffer in buffers]
    network.run(algorithm, buffers, seed=hosts)
    assert all(torch.equal(buffer, expected) for buffer in buffers)


@by_algorithm
@by_few_hosts
def test_not_a_number_has_the_same_bits_on_all_hosts_too(network, hosts, algorithm):
    not_a_number = 0x7FC00000
    buffers = [
        torch.full((40,), not_a_number + host, dtype=torch.int32).view(torch.float32)
        for host in range(hosts)
    ]
    network.run(algorithm, buffers, seed=hosts)
    bits = torch.stack([buffer.view(torch.int32) for buffer in buffers])
    assert torch.equal(bits, bits[:1].expand_as(bits))
    assert bool((bits >= not_a_number).all())


@by_few_hosts
def test_the_orders_differ_so_that_the_test_before_can_tell_them_apart(hosts):
    sums = [order(random_floats(hosts, 5 * hosts + 3)) for order in ORDERS.values()]
    assert hosts == 2 or not any(torch.equal(sums[i - 1], sums[i]) for i in range(3))


@by_few_hosts
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_direct_exchange_rounds_16_bit_floats_once(network, hosts, dtype):
    generator = torch.Generator().manual_seed(hosts)
    given = [torch.randn(500, generator=generator).to(dtype) for _ in range(hosts)]
    expected = sum_in_host_order([each.float() for each in given]).to(dtype)
    buffers = [each.clone() for each in given]
    network.run(DIRECT, buffers, seed=9)
    assert all(torch.equal(buffer, expected) for buffer in buffers)
    rounded_each_time = sum_in_host_order(given)
    assert hosts == 2 or not torch.equal(rounded_each_time, expected)


@by_few_hosts
def test_a_broadcast_goes_from_any_root_to_all(network, hosts):
    for root in {0, 1, hosts - 1}:
        buffers = [torch.arange(300) * hosts + host for host in range(hosts)]
        network.run(CHAIN, buffers, root=root, seed=root + 1)
        assert all(torch.equal(buffer, torch.arange(300) * hosts + root) for buffer in buffers)


def sizes_of_chunks(hosts):
    """Elements of each host's chunk: about the same, all but one empty, and anything."""
    last = [0] * hosts
    last[-1] = 301
    return (
        [7 + host % 2 for host in range(hosts)],
        last,
        [(host * 37) % 90 for host in range(hosts)],
    )


def own_chunks(buffers, sizes):
    return [buffer.split(sizes)[host] for host, buffer in enumerate(buffers)]


def sum_of_chunk(half, given, host):
    """given: the inputs of all hosts for the chunk of this one."""
    first = 0 if half == HALF_DIRECT else host + 1
    return functools.reduce(torch.add, given[first:] + given[:first])


@by_half
@by_hosts
def test_every_host_gets_the_sum_of_its_chunk_in_the_documented_order(network, hosts, half):
    for seed, sizes in enumerate(sizes_of_chunks(hosts)):
        given = random_floats(hosts, sum(sizes))
        buffers = [each.clone() for each in given]
        network.run(half, buffers, tables=tables_of(sizes, 4), seed=seed + 1)
        for host, own in enumerate(own_chunks(buffers, sizes)):
            parts = [each.split(sizes)[host] for each in given]
            assert torch.equal(own, sum_of_chunk(half, parts, host)), (sizes, host)


@by_half
@by_few_hosts
def test_half_of_an_exchange_divides_once_and_rounds_16_bit_floats_as_the_whole(
    network, hosts, half
):
    sizes = [50] * hosts
    given = [torch.arange(50 * hosts) * 7 + host for host in range(hosts)]
    buffers = [each.clone() for each in given]
    network.run(half, buffers, tables=tables_of(sizes, 8), op=_core.AVERAGE, divisor=hosts, seed=5)
    expected = own_chunks([torch.stack(given).sum(0) // hosts] * hosts, sizes)
    assert all(map(torch.equal, own_chunks(buffers, sizes), expected))
    if half == HALF_DIRECT:
        given = random_floats(hosts, 50 * hosts, torch.bfloat16)
        buffers = [each.clone() for each in given]
        network.run(half, buffers, tables=tables_of(sizes, 2), seed=6)
        whole = [each.clone() for each in given]
        network.run(DIRECT, whole, seed=7)
        assert all(map(torch.equal, own_chunks(buffers, sizes), own_chunks(whole, sizes)))


@by_few_hosts
def test_an_allgather_takes_parts_of_any_size(network, hosts):
    sizes = [(host * 37) % 200 for host in range(hosts)]
    buffers, tables, whole = gather_case(hosts, sizes)
    network.run(GATHER, buffers, tables=tables, seed=3)
    assert all(torch.equal(buffer, whole) for buffer in buffers)


@by_few_hosts
def test_an_alltoall_takes_parts_of_any_size(network, hosts):
    inputs, tables, expected, sent = pairwise_case(
        hosts, lambda a, b: 0 if a == b else (a * 7 + b * 13) % 150
    )
    buffers = [torch.zeros_like(each) for each in expected]
    network.run(PAIRWISE, buffers, inputs, tables, seed=4)
    assert all(torch.equal(*each) for each in zip(buffers, expected, strict=True))
    assert torch.equal(network.bytes, sent)


@by_hosts
@pytest.mark.parametrize(("algorithm", "half"), WHOLES.values(), ids=WHOLES)
def test_an_allreduce_is_its_half_for_the_owners_and_a_gather_bit_by_bit(
    network, hosts, algorithm, half
):
    for count in (1, hosts - 1, 5 * hosts + 3):
        given = random_floats(hosts, count)
        whole, halves = ([each.clone() for each in given] for _ in range(2))
        network.run(algorithm, whole, seed=hosts)
        tables = chunks_of_owners(hosts, count, 4)
        network.run(half, halves, tables=tables, seed=hosts + 1)
        united = [torch.full_like(each, 7) for each in given]
        for host, (begin, size) in enumerate(
            zip(*(each.tolist() for each in tables[2:]), strict=True)
        ):
            own = slice(begin // 4, (begin + size) // 4)
            assert torch.equal(halves[host][own], whole[host][own]), (count, host)
            united[host][own] = halves[host][own]
        network.run(GATHER, united, tables=tables, seed=hosts + 2)
        assert all(torch.equal(each, whole[0]) for each in united), count
