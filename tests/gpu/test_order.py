"""All members of a queue launch in one order, whatever the order in which they post."""

import gc
import sys
import threading
import weakref

import pytest
import torch

import hvdlite as hvd
from tests.gpu.stand_in import allreduce, new_queue, queue_for, request, result_of

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.hosts("2,1")]

routes = pytest.mark.parametrize("route", ["group", "staged"])
COUNTS = (1, 500, 3, 70_000, 0, 17)


def sum_of_ranks():
    return hvd.size() * (hvd.size() - 1) / 2


def start_in_opposite_orders(route):
    queue = new_queue(route)
    order = list(range(len(COUNTS)))
    if hvd.rank() % 2:
        order.reverse()
    transfers = {
        i: allreduce(queue, f"t{i}", torch.full((COUNTS[i],), float(i + hvd.rank()))) for i in order
    }
    wrong = []
    # Each rank also waits in the order in which it started them.
    for i in order:
        expected = torch.full((COUNTS[i],), i * hvd.size() + sum_of_ranks())
        if not torch.equal(result_of(transfers[i]), expected):
            wrong.append(i)
    assert not wrong


@routes
def test_transfers_started_in_opposite_orders_complete(world, route):
    world.run(start_in_opposite_orders, route)


def start_kinds_in_opposite_orders(route):
    queue = new_queue(route)
    rank, size = hvd.rank(), hvd.size()
    own = torch.full((size, 2), float(rank))
    ones = torch.ones(size, dtype=torch.int64)
    kinds = {
        "allreduce": lambda: queue.start(request("allreduce", "x", own, "Sum"), own, own.clone()),
        "broadcast": lambda: queue.start(request("broadcast", "x", own, root=1), own, own.clone()),
        "allgather": lambda: queue.start(request("allgather", "x", own), own, None),
        "alltoall": lambda: queue.start(request("alltoall", "x", own, splits=ones), own, None),
        "reducescatter": lambda: queue.start(
            request("reducescatter", "x", own, "Sum"), own, own[:1].clone()
        ),
    }
    order = sorted(kinds, reverse=bool(rank % 2))
    transfers = {kind: kinds[kind]() for kind in order}
    got = {kind: result_of(transfers[kind])[:, 0].tolist() for kind in order}
    members = [float(member) for member in range(size)]
    assert got == {
        "allreduce": [sum_of_ranks()] * size,
        "broadcast": [1.0] * size,
        "allgather": [member for member in members for _ in range(size)],
        "alltoall": members,
        "reducescatter": [sum_of_ranks()],
    }


@routes
def test_kinds_that_share_a_name_may_come_in_any_order(world, route):
    world.run(start_kinds_in_opposite_orders, route)


def start_from_threads(route):
    """Each thread's transfers are its own; no two threads of a rank come in the same order."""
    queue = new_queue(route)
    wrong = []

    def work(thread):
        for i in range(15):
            tensor = torch.full((thread + 1,), float(hvd.rank() + i))
            got = result_of(allreduce(queue, f"{thread}.{i}", tensor))
            if got.tolist() != [sum_of_ranks() + i * hvd.size()] * (thread + 1):
                wrong.append((thread, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads[:: -1 if hvd.rank() else 1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@routes
def test_several_threads_share_a_queue(world, route):
    world.run(start_from_threads, route)


def mix_with_the_engine(route):
    queue = new_queue(route)
    rank, size = hvd.rank(), hvd.size()
    wrong = []
    for i in range(10):
        on_host = [
            lambda i=i: hvd.allreduce_async(torch.full((40_000,), float(i + rank)), name=f"h{i}"),
            lambda: hvd.allgather_async(torch.full((rank + 1,), float(rank))),
        ]
        handles = [start() for start in on_host[:1]]
        transfer = allreduce(queue, f"g{i}", torch.full((900,), float(i * rank)))
        handles += [start() for start in on_host[1:]]
        if rank % 2:
            got = result_of(transfer)
        mean, gathered = (hvd.synchronize(handle) for handle in handles)
        if not rank % 2:
            got = result_of(transfer)
        expected = [member for member in range(size) for _ in range(member + 1)]
        if not (
            mean.eq(i + sum_of_ranks() / size).all()
            and gathered.tolist() == expected
            and got.eq(i * sum_of_ranks()).all()
        ):
            wrong.append(i)
    assert not wrong


@routes
def test_a_gpu_queue_and_operations_in_host_memory_go_side_by_side(world, route):
    world.run(mix_with_the_engine, route)


def wait_for_one_that_others_start_later(route):
    """A transfer that one member has not started holds up no other transfer."""
    queue = new_queue(route)
    late = None
    if hvd.rank() == 0:
        late = allreduce(queue, "late", torch.ones(100))
    got = [result_of(allreduce(queue, f"t{i}", torch.ones(10))).tolist() for i in range(5)]
    early = late is not None and late.poll()
    hvd.barrier()
    late = late or allreduce(queue, "late", torch.ones(100))
    assert result_of(late).eq(hvd.size()).all()
    assert got == [[hvd.size()] * 10] * 5
    assert not early


@routes
def test_a_transfer_that_some_have_not_started_holds_nothing_back(world, route):
    world.run(wait_for_one_that_others_start_later, route)


def poll_until_done(route):
    queue = new_queue(route)
    transfer = allreduce(queue, "polled", torch.ones(1000))
    polls = 0
    while not transfer.poll():
        polls += 1
    # No rank has waited for it.
    assert transfer.over
    assert result_of(transfer).eq(hvd.size()).all()


@routes
def test_a_transfer_makes_progress_while_nobody_waits_for_it(world, route):
    world.run(poll_until_done, route)


def work_without_a_thread(route):
    """As where MPI may be called by one thread only."""
    queue = new_queue(route)
    hvd.global_process_set.team.progress_thread = False
    order = list(range(6))[:: 1 if hvd.rank() else -1]
    transfers = {i: allreduce(queue, f"t{i}", torch.full((9,), float(i))) for i in order}
    assert not any(thread.name == "hvdlite-gpu-queue" for thread in threading.enumerate())
    while not transfers[3].poll():
        pass
    return [result_of(transfers[i])[0].item() for i in range(6)]


@routes
def test_without_a_thread_the_gpu_queue_goes_on_where_somebody_polls_or_waits(world, route):
    every = world.run(work_without_a_thread, route)
    assert every == [[float(i * world.size) for i in range(6)]] * world.size


def start_the_same_name_twice():
    queue = new_queue()
    text = ""
    if hvd.rank() == 0:
        transfer = allreduce(queue, "twice", torch.ones(3))
        try:
            allreduce(queue, "twice", torch.ones(3))
        except ValueError as error:
            text = str(error)
    # The others start it only now: until here it was in flight.
    hvd.barrier()
    if hvd.rank() != 0:
        transfer = allreduce(queue, "twice", torch.ones(3))
    assert result_of(transfer).tolist() == [hvd.size()] * 3
    # When it is over the name is free again.
    assert result_of(allreduce(queue, "twice", torch.ones(3))).tolist() == [hvd.size()] * 3
    return text


def test_the_same_kind_and_name_in_flight_is_refused_at_once(world):
    assert world.run(start_the_same_name_twice)[0] == (
        "allreduce 'twice': an operation of this kind and name is in flight already; wait for it "
        "first, or give this one another name"
    )


def watch_the_memory(route):
    queue = new_queue(route)
    result_of(allreduce(queue, "first", torch.ones(1)))  # the way is decided
    problems = []
    given = torch.full((50_000,), float(hvd.rank()))
    made = torch.empty_like(given)
    references = [weakref.ref(given), weakref.ref(made)]
    if hvd.rank() == 0:
        transfer = queue.start(request("allreduce", "watched", given, "Sum"), given, made)
        del given, made
        if not all(reference() is not None for reference in references):
            problems.append("a tensor went while the others had not started")
    hvd.barrier()
    if hvd.rank() != 0:
        transfer = queue.start(request("allreduce", "watched", given, "Sum"), given, made)
        del given, made
    result = result_of(transfer)
    gc.collect()
    if references[0]() is not None:
        problems.append(f"the input outlives the transfer: {sys.getrefcount(references[0]())}")
    if not result.eq(sum_of_ranks()).all():
        problems.append("the result is wrong")
    del result, transfer
    gc.collect()
    if references[1]() is not None:
        problems.append("the result outlives who asked for it")
    # Dropped at once: the queue alone knows of it.
    dropped = torch.ones(1000)
    reference = weakref.ref(dropped)
    allreduce(queue, "dropped", dropped)
    del dropped
    result_of(allreduce(queue, "last", torch.ones(1)))
    while queue.is_busy():
        pass
    gc.collect()
    if reference() is not None:
        problems.append("what nobody waits for is kept")
    assert not problems


@routes
def test_tensors_live_until_their_work_is_queued_and_no_longer(world, route):
    world.run(watch_the_memory, route)


def watch_the_thread_sleep():
    """Notes when the thread goes to sleep, and how often it looks at the transfers."""
    queue = new_queue()
    steps = []
    asleep = threading.Event()
    step, wait = queue._step, queue._changed.wait
    queue._step = lambda: steps.append(None) or step()
    queue._changed.wait = lambda: asleep.set() or wait()
    result_of(allreduce(queue, "x", torch.ones(3)))
    assert asleep.wait(20.0)
    idle = len(steps)
    for _ in range(50):
        hvd.allreduce(torch.ones(1))
    assert len(steps) == idle
    asleep.clear()
    result_of(allreduce(queue, "x", torch.ones(3)))
    assert asleep.wait(20.0)
    assert len(steps) > idle


def test_an_idle_gpu_queue_is_not_woken_by_operations_in_host_memory(world):
    world.run(watch_the_thread_sleep)


def work_in_overlapping_sets(route):
    world_queue = new_queue(route)
    rank, size = hvd.rank(), hvd.size()
    first = hvd.add_process_set(range(size - 1))
    last = hvd.add_process_set([size - 1])
    queues = [(world_queue, range(size))]
    for process_set in (first, last):
        if process_set.included():
            queues.append((queue_for(process_set, route), process_set.ranks))
    started = []
    for i in range(4):
        for queue, members in queues[:: 1 if rank else -1]:
            tensor = torch.full((20,), float(rank + 10 * i))
            transfer = allreduce(queue, f"t{i}", tensor)
            started.append((transfer, sum(members) + 10 * i * len(members)))
    wrong = [expected for t, expected in started if not result_of(t).eq(expected).all()]
    assert not wrong
    hvd.remove_process_set(first)
    assert result_of(allreduce(world_queue, "after", torch.ones(2))).tolist() == [size] * 2


@routes
def test_each_process_set_has_a_gpu_queue_of_its_own(world, route):
    world.run(work_in_overlapping_sets, route)


def disagree(route):
    queue = new_queue(route)
    rank = hvd.rank()
    texts = []
    for _ in range(2):
        good = [allreduce(queue, f"good {i}", torch.ones(9)) for i in range(3)]
        bad = allreduce(queue, "bad", torch.ones(4 if rank == 1 else 3))
        good += [allreduce(queue, f"good {i}", torch.ones(9)) for i in range(3, 6)]
        texts.append(bad.wait())
        assert all(result_of(transfer).eq(hvd.size()).all() for transfer in good)
    bad = allreduce(queue, "bad", torch.ones(3), "Max" if rank == 1 else "Sum")
    texts.append(bad.wait())
    return texts


@routes
def test_a_disagreement_fails_on_every_rank_alike_and_takes_no_turn(world, route):
    (texts,) = set(map(tuple, world.run(disagree, route)))
    shapes, again, ops = texts
    assert shapes == again
    assert "allreduce 'bad': " in shapes
    assert "rank 1 on " in shapes
    assert "float32[4]" in shapes
    assert "float32[3]" in shapes
    assert "Max" in ops
    assert "Sum" in ops


def meet_a_tensor_in_host_memory():
    queue = new_queue()
    if hvd.rank() == 1:
        try:
            hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum)
        except hvd.HorovodInternalError as error:
            text = str(error)
    else:
        text = allreduce(queue, "x", torch.ones(3)).wait()
    assert result_of(allreduce(queue, "x", torch.ones(3))).eq(hvd.size()).all()
    return text


def test_a_gpu_tensor_against_one_in_host_memory_is_a_disagreement(world):
    (text,) = set(world.run(meet_a_tensor_in_host_memory))
    assert "rank 1 on " in text
    assert "a tensor in host memory" in text
    assert "a tensor on a GPU" in text
    assert "make the device the same on every rank" in text


def agree_only_in_a_kind():
    queue = new_queue()
    kind = "broadcast" if hvd.rank() == 1 else "allreduce"
    unnamed = request(kind, "x", torch.ones(3)).replace(unnamed=True)
    return queue.start(unnamed, torch.ones(3), torch.ones(3)).wait()


def test_unnamed_transfers_of_different_kinds_are_an_error_and_no_hang(world):
    (text,) = set(world.run(agree_only_in_a_kind))
    assert "broadcast" in text
    assert "allreduce" in text
