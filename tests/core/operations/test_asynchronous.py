"""Operations make progress on their own, and no global order of them is needed."""

import sys
import threading
import time

import pytest
import torch

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.core import limits

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.hosts("1,1", "2,2", "2,1,1")]

# Some travel in the same message as their flag, some in one block, some in several pieces.
COUNTS = {
    "default knobs": (1, 500, 3, 70_000, 0, 2_500_000, 17),
    "tiny knobs": (1, 50, 3, 700, 0, 25_000, 17),
}


def start_in_opposite_orders(counts):
    hvd.init()
    order = list(range(len(counts)))
    if hvd.rank() % 2:
        order.reverse()
    handles = {}
    for i in order:
        handles[i] = hvd.allreduce_async(
            torch.full((counts[i],), float(i + hvd.rank())), name=f"t{i}", op=hvd.Sum
        )
    wrong = []
    # Each rank also waits in the order in which it has started.
    for i in order:
        expected = i * hvd.size() + hvd.size() * (hvd.size() - 1) / 2
        if not torch.equal(hvd.synchronize(handles[i]), torch.full((counts[i],), expected)):
            wrong.append(i)
    assert not wrong


@pytest.mark.parametrize("knobs", limits.KNOBS)
def test_operations_started_in_opposite_orders_complete(world, knobs):
    world.run(start_in_opposite_orders, COUNTS[knobs], knobs=limits.KNOBS[knobs])


def start_kinds_in_opposite_orders():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    kinds = {
        "allreduce": lambda: hvd.allreduce_async(torch.ones(9), name="same name", op=hvd.Sum),
        "broadcast": lambda: hvd.broadcast_async(torch.full((9,), rank + 1.0), 0, name="same name"),
        "allgather": lambda: hvd.allgather_async(torch.full((2,), float(rank)), name="same name"),
    }
    order = sorted(kinds, reverse=bool(rank % 2))
    handles = {kind: kinds[kind]() for kind in order}
    got = {kind: hvd.synchronize(handles[kind]).tolist() for kind in order}
    assert got == {
        "allreduce": [size] * 9,
        "broadcast": [1.0] * 9,
        "allgather": [float(member) for member in range(size) for _ in range(2)],
    }


def test_operations_of_different_kinds_may_share_a_name(world):
    world.run(start_kinds_in_opposite_orders)


def wait_for_one_that_others_start_later():
    hvd.init()
    late = None
    if hvd.rank() == 0:
        late = hvd.allreduce_async(torch.ones(100_000), name="late", op=hvd.Sum)
    for _ in range(5):
        hvd.allreduce(torch.ones(10), op=hvd.Sum)
    if hvd.rank() == 0:
        assert not hvd.poll(late)
    hvd.barrier()
    if late is None:
        late = hvd.allreduce_async(torch.ones(100_000), name="late", op=hvd.Sum)
    assert hvd.synchronize(late).eq(hvd.size()).all()


def test_an_operation_that_some_have_not_started_holds_nothing_back(world):
    world.run(wait_for_one_that_others_start_later)


def hold_the_lock_until_the_data_is_there(count):
    """No Python runs on any rank meanwhile but this loop, which calls nothing of hvdlite."""
    hvd.init()
    hvd.allreduce(torch.ones(1))
    tensor = torch.ones(count)
    view = memoryview(tensor.numpy())
    interval = sys.getswitchinterval()
    # No other Python thread gets the interpreter's lock.
    sys.setswitchinterval(1000.0)
    try:
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
        limit = time.monotonic() + 20.0
        while (view[0] != hvd.size() or view[-1] != hvd.size()) and time.monotonic() < limit:
            pass
        # The last bytes may be written shortly before the operation is marked as done.
        limit = time.monotonic() + 1.0
        while time.monotonic() < limit:
            pass
        done = hvd.poll(handle)
    finally:
        sys.setswitchinterval(interval)
    hvd.synchronize(handle)
    return done


@pytest.mark.wide_in(3, "1,1", "2,1,1")  # it takes a second
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_the_first_poll_after_a_busy_loop_that_holds_the_gil_is_true(world, count):
    assert world.run(hold_the_lock_until_the_data_is_there, count) == [True] * world.size


def start_the_same_name_twice():
    from mpi4py import MPI

    hvd.init()
    texts = []
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
        try:
            hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
        except ValueError as error:
            texts.append(str(error))
    # The others start it only now: until here it was in flight.
    MPI.COMM_WORLD.Barrier()
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    # When it has ended the name is free again.
    assert hvd.allreduce(torch.ones(3), name="twice", op=hvd.Sum).tolist() == [hvd.size()] * 3
    return texts


def test_a_second_operation_in_flight_with_the_same_name_is_an_error_at_once(world):
    texts = world.run(start_the_same_name_twice)[0]
    assert len(texts) == 1
    assert "twice" in texts[0]


def poll_in_threads_until_shutdown(cycles, num_threads):
    """Rank 0's operation never ends well: the others leave without it."""
    from mpi4py import MPI

    ended = []

    def poll(handle):
        while not hvd.poll(handle):
            pass
        ended.append(True)

    for _ in range(cycles):
        hvd.init()
        threads = []
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(3), name="never")
            threads = [threading.Thread(target=poll, args=[handle]) for _ in range(num_threads)]
            for thread in threads:
                thread.start()
            time.sleep(0.05)
        else:
            time.sleep(0.15)  # so long does rank 0 find no one who answers
        hvd.shutdown()
        for thread in threads:
            thread.join()
        MPI.COMM_WORLD.Barrier()
    return len(ended)


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.wide_in(2, "mpich")  # it takes three seconds, and concerns several hosts
def test_an_operation_may_be_polled_while_another_thread_shuts_down(world):
    assert world.run(poll_in_threads_until_shutdown, 20, 12)[0] == 20 * 12


def late_by_turns(seconds):
    """Operations for which a rank is late, which others wait for asleep; and how often such a
    sleeper was not told that it could go on."""
    hvd.init()
    x = torch.ones(1)
    end = time.monotonic() + seconds
    calls = 0
    while hvd.allreduce(torch.tensor(float(time.monotonic() < end)), op=hvd.Min):
        if calls % hvd.size() == hvd.rank():
            time.sleep(calls % 7 / 2000)
        hvd.allreduce_(x, name="late", op=hvd.Max)
        calls += 1
    return worlds.current().team.engine.counters()["late_wakings"]


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,2")
@pytest.mark.wide_in("mpich")
def test_a_caller_that_waits_while_the_idle_thread_looks_is_woken_afterwards(world):
    """The thread looks now and then; a caller that waits meanwhile sleeps until it has looked."""
    assert not any(world.run(late_by_turns, 3.0))
