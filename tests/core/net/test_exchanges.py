"""The exchanges between hosts, up to 64 of them: the core's own state machines over a network in
memory (simulation.c). What comes out, and how many messages and bytes that took."""

from __future__ import annotations

import ctypes
import functools
import itertools
from pathlib import Path

import pytest
import torch

from benchmarks import cost
from hvdlite import _core
from tests.harness.compiled import compiled, linked, sources

RING, DIRECT, DOUBLING, GATHER, CHAIN, PAIRWISE, HALF_RING, HALF_DIRECT = range(8)
HALVES = {"half of the ring": HALF_RING, "half of the direct exchange": HALF_DIRECT}
ALLREDUCES = {"ring": RING, "direct": DIRECT, "recursive doubling": DOUBLING}
HOSTS = (*range(2, 18), 24, 31, 32, 33, 63, 64)
FEW_HOSTS = (2, 3, 4, 7, 16, 33, 64)
ACTIVE = 4  # steps of a pairwise exchange that are under way at once
ANSWERS = (
    "well",
    "no memory",
    "stuck",
    "a receive of another size",
    "a message without receiver",
    "a buffer that was written before its message had left",
)

by_algorithm = pytest.mark.parametrize("algorithm", ALLREDUCES.values(), ids=ALLREDUCES)
by_half = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
by_hosts = pytest.mark.parametrize("hosts", HOSTS)
by_few_hosts = pytest.mark.parametrize("hosts", FEW_HOSTS)


def library(folder: Path) -> ctypes.CDLL:
    parts = ["base/schedule", "net/exchange", "net/pairwise", "net/streams", "net/wire"]
    own = Path(__file__).with_name("simulation.c")
    objects = map(compiled, [own, *sources(*parts, "kernels/reduce*")])
    return ctypes.CDLL(str(linked(folder / "simulation.so", objects, "-shared")))


class Network:
    """What went over it: `messages` and `bytes` by sender and receiver; and in how many `ticks`, in
    each of which a message may go from every host to every other one."""

    def __init__(self, simulation: ctypes.CDLL, hosts: int) -> None:
        self._simulation = simulation
        self.hosts = hosts
        self.messages = torch.zeros((hosts, hosts), dtype=torch.int64)
        self.bytes = torch.zeros((hosts, hosts), dtype=torch.int64)
        self.ticks = 0

    def run(
        self,
        algorithm,
        buffers,
        inputs=(),
        tables=(None, None, None, None),
        op=_core.SUM,
        divisor=1,
        root=0,
        segment_bytes=64,
        seed=0,
    ):
        """In place over `buffers`, one of each host. seed 0: everything in step."""
        dtype = getattr(_core, str(buffers[0].dtype).removeprefix("torch.").upper())
        ticks = ctypes.c_uint64()
        addresses = ctypes.c_void_p * self.hosts
        answer = self._simulation.simulate(
            *(algorithm, self.hosts, dtype, op, ctypes.c_int64(divisor)),
            *(ctypes.c_size_t(buffers[0].numel()), root, ctypes.c_size_t(segment_bytes)),
            addresses(*(buffer.data_ptr() for buffer in buffers)),
            addresses(*(given.data_ptr() for given in inputs or buffers)),
            (ctypes.c_void_p * 4)(
                *(table.data_ptr() if table is not None else 0 for table in tables)
            ),
            ctypes.c_uint64(seed),
            *(ctypes.c_void_p(counted.data_ptr()) for counted in (self.messages, self.bytes)),
            ctypes.byref(ticks),
        )
        assert ANSWERS[answer] == "well"
        self.ticks = ticks.value


@pytest.fixture(scope="session")
def simulation(tmp_path_factory):
    return library(tmp_path_factory.mktemp("simulation"))


@pytest.fixture
def network(simulation, hosts):
    return Network(simulation, hosts)


def rounds(hosts):
    """log2 of the largest power of two, and how many hosts are beyond it."""
    whole = hosts.bit_length() - 1
    return whole, hosts - 2**whole


def random_floats(hosts, count, dtype=torch.float32):
    """Sums of these depend on their order."""
    generator = torch.Generator().manual_seed(hosts * 1000 + count)
    values = torch.randn((hosts, count), generator=generator, dtype=torch.float64)
    return list((values * 10.0 ** (values * 2).round()).to(dtype))


# ---- results ----


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


def cut(tensor, hosts):
    """The hosts' chunks: whole cache lines but for the last one, the first ones a line longer."""
    lines = tensor.split(64 // tensor.element_size())
    parts = torch.arange(len(lines)).tensor_split(hosts)
    return [torch.cat([tensor[:0], *(lines[line] for line in part)]) for part in parts]


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


def tables_of(sizes, item_bytes):
    sizes_bytes = item_bytes * torch.tensor(sizes)
    return None, None, sizes_bytes.cumsum(0) - sizes_bytes, sizes_bytes


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


def gather_case(hosts, sizes):
    """Buffers with the own part in place; offsets and sizes in bytes; the result."""
    sizes = torch.tensor(sizes)
    offsets = sizes.cumsum(0) - sizes
    whole = torch.arange(int(sizes.sum())).remainder(251).to(torch.uint8)
    buffers = [torch.zeros_like(whole) for _ in range(hosts)]
    for buffer, begin, size in zip(buffers, offsets.tolist(), sizes.tolist(), strict=True):
        buffer[begin : begin + size] = whole[begin : begin + size]
    return buffers, (None, None, offsets, sizes), whole


@by_few_hosts
def test_an_allgather_takes_parts_of_any_size(network, hosts):
    sizes = [(host * 37) % 200 for host in range(hosts)]
    buffers, tables, whole = gather_case(hosts, sizes)
    network.run(GATHER, buffers, tables=tables, seed=3)
    assert all(torch.equal(buffer, whole) for buffer in buffers)


def pairwise_case(hosts, size_of):
    """Host a sends size_of(a, b) bytes to b, each 1 + (a * 16 + b) mod 250."""
    sent = torch.tensor([[size_of(a, b) for b in range(hosts)] for a in range(hosts)])
    tables = [each.contiguous() for each in (sent.cumsum(1) - sent, sent)]
    tables += [each.contiguous() for each in (sent.T.cumsum(1) - sent.T, sent.T)]

    def parts(pairs):
        values = [torch.full((size_of(a, b),), 1 + (a * 16 + b) % 250) for a, b in pairs]
        return torch.cat(values).to(torch.uint8)

    members = range(hosts)
    inputs = [parts((host, peer) for peer in members) for host in members]
    expected = [parts((peer, host) for peer in members) for host in members]
    return inputs, tables, expected, sent


@by_few_hosts
def test_an_alltoall_takes_parts_of_any_size(network, hosts):
    inputs, tables, expected, sent = pairwise_case(
        hosts, lambda a, b: 0 if a == b else (a * 7 + b * 13) % 150
    )
    buffers = [torch.zeros_like(each) for each in expected]
    network.run(PAIRWISE, buffers, inputs, tables, seed=4)
    assert all(torch.equal(*each) for each in zip(buffers, expected, strict=True))
    assert torch.equal(network.bytes, sent)


# ---- costs: the table of docs/design/data-path.md, and cost.md ----


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


def chunks_of_owners(hosts, count, item_bytes):
    """Host h owns the chunk that the ring's first half completes there: the next host's."""
    starts = [0, *itertools.accumulate(map(len, cut(torch.empty(count), hosts)))]
    owned = [(host + 1) % hosts for host in range(hosts)]
    begins = torch.tensor([item_bytes * starts[chunk] for chunk in owned])
    sizes = torch.tensor([item_bytes * (starts[chunk + 1] - starts[chunk]) for chunk in owned])
    return None, None, begins, sizes


WHOLES = {"ring": (RING, HALF_RING), "direct": (DIRECT, HALF_DIRECT)}


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
