"""Any number of operations may be under way at once, and none holds back another."""

import random
import threading

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds

EVENTS = {"HVDLITE_EVENT_LOG": "100000"}


def moments():
    """When each operation reached each state, by (name, state)."""
    return {(name, what): at for at, name, what in worlds.current().team.engine.events()}


def small_beside_large():
    hvd.init()
    large = hvd.allreduce_async_(torch.ones(1 << 26), name="large", op=hvd.Sum)  # 256 MiB
    while ("large", "RUNNING") not in moments():
        assert not hvd.poll(large)
    small = hvd.allreduce_async(torch.ones(2), name="small", op=hvd.Sum)
    assert hvd.synchronize(small).tolist() == [hvd.size()] * 2
    assert hvd.synchronize(large)[-1] == hvd.size()
    at = moments()
    assert at["large", "RUNNING"] < at["small", "POSTED"]
    assert at["small", "DONE"] < at["large", "DONE"]


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1", "2,1")
def test_a_small_operation_ends_while_a_large_one_started_before_is_running(world):
    world.run(small_beside_large, knobs=EVENTS)


def thousands_from_threads(threads, each):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    wrong = []

    def work(thread):
        order = list(range(each))
        random.Random(f"{rank} {thread}").shuffle(order)
        handles = {
            i: hvd.allreduce_async(
                torch.full((1 + i % 7,), float(i + rank)), name=f"{thread}.{i}", op=hvd.Sum
            )
            for i in order
        }
        random.Random(f"{thread} {rank}").shuffle(order)
        for i in order:
            expected = i * size + size * (size - 1) / 2
            if hvd.synchronize(handles[i]).tolist() != [expected] * (1 + i % 7):
                wrong.append((thread, i))

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_thousands_are_in_flight_from_several_threads_each_in_its_own_order(world):
    world.run(thousands_from_threads, 4, 750)


def repeats(count):
    """Control messages that this rank has sent per operation."""
    hvd.init()
    engine = worlds.current().team.engine
    sent = []
    for elems in (2, 10_000):
        x = torch.ones(elems)
        hvd.allreduce(x, name="repeated")
        hvd.barrier()
        before = engine.counters()["control_messages"]
        for _ in range(count):
            hvd.allreduce(x, name="repeated")
        sent.append((engine.counters()["control_messages"] - before) / count)
    return sent


@pytest.mark.hosts("1,1", "2,2", "2,1,1")
def test_a_repeated_operation_costs_one_small_round_trip_between_the_hosts(world):
    per_rank = world.run(repeats, 50)
    others = world.hosts.count(",")
    for size in range(2):
        total = sum(counts[size] for counts in per_rank)
        # To the coordinator and back; rarely, that tags are free again.
        assert others <= total <= 2 * others + 0.5


def many_small(count, elems):
    """Packets that this rank has sent for `count` operations that were given at once."""
    hvd.init()
    engine = worlds.current().team.engine
    tensors = [torch.full((elems,), float(i)) for i in range(count)]
    hvd.barrier()
    before = engine.counters()["control_messages"]
    operations = [
        engine.post(
            _core.posting(
                *(_core.ALLREDUCE, f"small {i}", False, _core.FLOAT32, tensor, tensor, _core.SUM)
            ),
            False,
        )
        for i, tensor in enumerate(tensors)
    ]
    for operation in operations:
        assert operation.wait() is None
    for i, tensor in enumerate(tensors):
        assert tensor.eq(i * hvd.size()).all()
    return engine.counters()["control_messages"] - before


@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.parametrize(("count", "elems", "most"), [(400, 5, 250), (200, 2000, 100)])
def test_many_small_operations_go_between_the_hosts_as_few_messages(world, count, elems, most):
    # Each alone would be a message there and one back: 2 per operation and more. How many go in one
    # depends on how often the ranks get the processor, which a busy machine takes from them.
    assert any(sum(world.run(many_small, count, elems)) < most for _ in range(5))
