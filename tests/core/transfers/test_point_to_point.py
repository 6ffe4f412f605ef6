"""Sends and receives: matched by source and tag, in order, within a host and between hosts."""

import platform
import random
from collections import defaultdict

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from tests.core.messages import HOSTS, done, engine, pattern

# Each side of what travels with the announcement, of a block, of a segment, of several.
SIZES = (0, 1, 4095, 4096, 4097, 16384, 61440, 61441, 300_000, 2_000_000)


def ring(sizes, receive_first):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    to, source = (rank + 1) % size, (rank - 1) % size
    for i, count in enumerate(sizes):
        into = torch.full((count,), 255, dtype=torch.uint8)
        if receive_first:
            received = engine().recv(into, source, i)
            hvd.barrier()
            sent = engine().send(pattern(count, rank + i), to, i)
        else:
            sent = engine().send(pattern(count, rank + i), to, i)
            hvd.barrier()
            received = engine().recv(into, source, i)
        done(sent, received)
        assert into.equal(pattern(count, source + i))
        assert received.rows() == (source, count)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts(*HOSTS)
@pytest.mark.parametrize("receive_first", [True, False])
def test_a_message_of_any_size_arrives_whichever_side_comes_first(world, receive_first):
    world.run(ring, SIZES, receive_first)


def large_messages(blocks_past_caches):
    """Just below the size from which copies read ahead, and above; from and to odd addresses."""
    hvd.init()
    other = 1 - hvd.rank()
    counters = engine().counters
    before = counters()["past_cache_bytes"]
    _core.force_past_cache(blocks_past_caches)
    try:
        ring(((16 << 20) - 1, (16 << 20) + 77), True)
        count = (16 << 20) + 64
        into = torch.full((count + 2,), 255, dtype=torch.uint8)
        odd = torch.cat([torch.zeros(1, dtype=torch.uint8), pattern(count, hvd.rank())])[1:]
        received, sent = engine().recv(into[1:-1], other, 9), engine().send(odd, other, 9)
        done(received, sent)
    finally:
        _core.force_past_cache(None)
    assert into[1:-1].equal(pattern(count, other))
    assert into[0] == into[-1] == 255
    passes = blocks_past_caches and platform.machine() == "x86_64"
    assert (counters()["past_cache_bytes"] > before) == passes


@pytest.mark.ranks(2)
@pytest.mark.hosts("2")
@pytest.mark.parametrize("blocks_past_caches", [False, True])
def test_large_messages_arrive_past_the_caches(world, blocks_past_caches):
    world.run(large_messages, blocks_past_caches)


def small_blocks():
    ring((0, 1, 63, 64, 65, 1000, 4097, 50_001), True)


@pytest.mark.hosts("1,1")
def test_the_units_of_the_engine_do_not_show(world):
    knobs = {"HVDLITE_INLINE_BYTES": "64", "HVDLITE_SEGMENT_BYTES": "100"}
    world.run(small_blocks, knobs=knobs)


def program(seed, count):
    """A random list of messages. Every rank posts its sides of them in an order of its own, but
    those of one pair and tag in the list's."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    drawn = random.Random(seed)
    messages = []
    for number in range(count):
        source, to, tag = drawn.randrange(size), drawn.randrange(size), drawn.randrange(3)
        messages.append((number, source, to, tag, drawn.choice(SIZES[:-1])))
    steps = [(m, True) for m in messages if m[1] == rank]
    steps += [(m, False) for m in messages if m[2] == rank]
    mixed = random.Random(f"{seed} {rank}")
    places = [mixed.random() for _ in steps]
    lines = defaultdict(list)  # the places that a line has, which it takes in its order
    for at, (m, sends) in zip(places, steps, strict=True):
        lines[m[1:4], sends].append(at)
    for places_of_line in lines.values():
        places_of_line.sort(reverse=True)
    steps = sorted(((lines[m[1:4], s].pop(), m, s) for m, s in steps), key=lambda step: step[0])
    operations = []
    for _, (number, source, to, tag, bytes_), sends in steps:
        tensor = pattern(bytes_, number) if sends else torch.zeros(bytes_, dtype=torch.uint8)
        post = engine().send if sends else engine().recv
        operations.append((post(tensor, to if sends else source, tag), tensor, number, sends))
    for operation, tensor, number, sends in operations:
        done(operation)
        assert sends or tensor.equal(pattern(len(tensor), number)), number


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts(*HOSTS)
def test_messages_of_random_programs_arrive_in_order_at_their_own_receives(world):
    for seed in range(5):
        world.run(program, seed, 150)


def from_any(count):
    """Rank 0 receives from all others, by receives from any source and from each, in turns."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    large = 30_000
    if rank:
        sent = [
            engine().send(pattern(4 if i % 2 else large, 100 * rank + i), 0, i % 2)
            for i in range(count)
        ]
        done(*sent)
        return
    got = defaultdict(list)
    waiting = []
    for i in range(count * (size - 1)):
        tag = i % 2
        into = torch.zeros(4 if tag else large, dtype=torch.uint8)
        waiting.append((engine().recv(into, -1, tag), into, tag))
    for operation, into, tag in waiting:
        done(operation)
        source, bytes_ = operation.rows()
        assert bytes_ == len(into)
        number = 2 * len(got[source, tag]) + tag
        assert into.equal(pattern(len(into), 100 * source + number))
        got[source, tag].append(number)
    assert all(len(numbers) == count // 2 for numbers in got.values())


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts(*HOSTS)
def test_a_receive_from_any_source_takes_messages_of_each_in_order(world):
    world.run(from_any, 40)


def oldest_first():
    """Of a receive from any source and one from rank 0, the one that was posted first takes the
    message, the other one the next."""
    hvd.init()
    if hvd.rank() == 1:
        for first, second in ((-1, 0), (0, -1)):
            a, b = torch.zeros(1), torch.zeros(1)
            operations = engine().recv(a, first, 1), engine().recv(b, second, 1)
            hvd.barrier()
            done(*operations)
            assert (a.item(), b.item()) == (1.0, 2.0)
        return
    for _ in range(2):
        hvd.barrier()
        done(engine().send(torch.ones(1), 1, 1), engine().send(torch.full((1,), 2.0), 1, 1))


@pytest.mark.hosts("1,1")
def test_the_receive_that_was_posted_first_takes_the_message(world):
    world.run(oldest_first)


def thousands(count):
    """All ranks post all of theirs before any is waited for, in opposite orders."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    others = [r for r in range(size) if r != rank]
    order = list(range(count)) if rank % 2 else list(reversed(range(count)))
    bytes_of = [8000 if i % 10 == 0 else 8 for i in range(count)]
    into = {
        (r, i): torch.zeros(bytes_of[i], dtype=torch.uint8) for r in others for i in range(count)
    }
    sent, received = [], []
    for i in order:
        for r in others:
            sent.append(engine().send(pattern(bytes_of[i], i + rank), r, i))
    for i in reversed(order):
        for r in others:
            received.append(engine().recv(into[r, i], r, i))
    x = hvd.allreduce(torch.ones(100_000), op=hvd.Sum, name="between")
    assert x.eq(size).all()
    done(*sent, *received)
    for (r, i), tensor in into.items():
        assert tensor.equal(pattern(bytes_of[i], i + r)), (r, i)


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts(*HOSTS)
def test_thousands_are_in_flight_in_opposite_orders_and_collectives_pass_between(world):
    world.run(thousands, 1500)


def collective_first():
    """Each ends while the other waits."""
    hvd.init()
    rank = hvd.rank()
    x = torch.zeros(1_000_000)
    waits = engine().recv(x, 1 - rank, 1) if rank < 2 else None
    hvd.allreduce(torch.ones(3_000_000), name="passes")
    summed = hvd.allreduce_async(torch.ones(10), name="late") if rank == 0 else None
    if rank < 2:
        sent = engine().send(torch.full((1_000_000,), float(rank)), 1 - rank, 1)
        done(sent, waits)
        assert x.eq(1 - rank).all()
    if summed is not None:
        assert not hvd.poll(summed)
        done(engine().send(torch.ones(1), 1, 2))
    elif rank == 1:
        done(engine().recv(torch.ones(1), 0, 2))
    if summed is None:
        summed = hvd.allreduce_async(torch.ones(10), name="late")
    hvd.synchronize(summed)


@pytest.mark.hosts("1,1")
def test_messages_and_collectives_do_not_wait_for_each_other(world):
    world.run(collective_first)
