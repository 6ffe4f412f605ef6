"""Several threads wait for one operation: all get the same object, which is computed once."""

import sys
import threading

import pytest
import torch

import hvdlite as hvd
from hvdlite.collectives import handles
from hvdlite.collectives.flat_buffers import FlatBuffer

NUM_THREADS = 4
BEGINS = {
    "allreduce": lambda i: hvd.allreduce_async(torch.full((3,), i), op=hvd.Sum),
    "allgather": lambda i: hvd.allgather_async(torch.full((3,), i)),
    "alltoall": lambda i: hvd.alltoall_async(torch.full((4,), i)),
    "fused": lambda i: hvd.grouped_allreduce_async([torch.full((3,), i), torch.ones(5).int()]),
    "fused, named": lambda i: hvd.grouped_allreduce_async_(
        [torch.full((3,), float(i)), torch.ones(2)], name="g", op=hvd.Average
    ),
    "gathered": lambda i: hvd.grouped_allgather_async([torch.full((3,), i)] * 2, "g"),
    "sparse": lambda i: hvd.sparse_allreduce_async(
        torch.full((3,), float(i) + 1).to_sparse(), "s", hvd.Average
    ),
}


def in_threads(count, call):
    """Starts threads at the same time; what each of them returned or raised."""
    start = threading.Barrier(count)
    found = []

    def run():
        start.wait()
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def wait_in_threads(rounds):
    hvd.init()
    wrong = set()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for i in range(rounds):
            for kind, begin in BEGINS.items():
                handle = begin(i)

                def wait(handle=handle):
                    if callable(handle):
                        return handle()
                    while not hvd.poll(handle):
                        pass
                    return hvd.synchronize(handle)

                found = in_threads(NUM_THREADS, wait)
                if any(one is not found[0] for one in found) or isinstance(found[0], Exception):
                    wrong.add((kind, str(found)))
                if kind == "sparse" and not found[0].to_dense().eq(i + 1).all():
                    wrong.add((kind, "was divided twice"))
    finally:
        sys.setswitchinterval(interval)
    return wrong


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_threads_that_wait_for_one_operation_get_the_same_object(world):
    assert world.run(wait_in_threads, 20) == [set()] * 2


class Ended:
    """An operation that has ended well."""

    def poll(self):
        return True

    def wait(self):
        return None


def finished_by(finish):
    """Two threads wait for one handle; the second comes while the first is finishing it."""
    begun, second, ended = threading.Event(), [], []

    def once():
        begun.set()
        if not second:
            # Until the other one waits for this one, or finishes the handle too.
            second.append(threading.Thread(target=wait))
            second[0].start()
            came.wait()
        return finish()

    def wait():
        try:
            ended.append(handles.synchronize(handle))
        except Exception as error:
            ended.append(error)

    came = threading.Event()

    class Watched:
        """The handle's lock, which tells when the second thread asks for it."""

        def __init__(self, lock):
            self._lock = lock

        def __enter__(self):
            if second and threading.current_thread() is second[0]:
                came.set()
            self._lock.acquire()

        def __exit__(self, *_):
            self._lock.release()

    handle = handles.Handle(Ended(), finish=once)
    handle._finishing = Watched(handle._finishing)
    wait()
    second[0].join()
    return ended


def test_one_thread_makes_the_result_and_the_others_wait_for_it():
    made = []

    def make():
        made.append(object())
        return made[-1]

    assert finished_by(make) == made * 2
    assert len(made) == 1


def test_all_threads_get_the_exception_of_the_one_that_makes_the_result():
    raised = []

    def fail():
        raised.append(MemoryError("no room"))
        raise raised[-1]

    assert finished_by(fail) == raised * 2
    assert len(raised) == 1


def interrupted():
    """A group whose waiter is interrupted when its buffer is kept for the next group already."""
    hvd.init()

    def start(value):
        tensors = [torch.full((3,), value), torch.full((2,), value)]
        return hvd.grouped_allreduce_async(tensors, op=hvd.Sum)

    keep = FlatBuffer.keep

    def keep_and_interrupt(buffer):
        keep(buffer)
        raise KeyboardInterrupt

    FlatBuffer.keep = keep_and_interrupt
    try:
        first = start(1.0)
        with pytest.raises(KeyboardInterrupt):
            hvd.synchronize(first)
    finally:
        FlatBuffer.keep = keep
    second = start(2.0)  # in the same buffer
    third = [hvd.synchronize(handle)[0].tolist() for handle in (first, second)]
    assert third == [[1.0] * 3, [2.0] * 3]


@pytest.mark.ranks(1)
@pytest.mark.mpis("openmpi")
def test_an_interrupted_waiter_gets_the_values_when_it_waits_again(world):
    world.run(interrupted)


def sparse_interrupted():
    """An interruption between the division of the sum and the making of the result."""
    hvd.init()
    wait = hvd.sparse_allreduce_async(torch.tensor([8.0, 0.0, 2.0]).to_sparse(), "s", hvd.Average)
    make, torch.sparse_coo_tensor = torch.sparse_coo_tensor, interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        torch.sparse_coo_tensor = make
    assert wait().to_dense().tolist() == [8.0, 0.0, 2.0]


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_an_interrupted_sparse_average_is_not_divided_twice(world):
    world.run(sparse_interrupted)


def waits_again_at(number, handle):
    """What `synchronize` returns where the number-th line of its making the result is left for a
    second wait, as a signal handler's, and what that returns (None: there are fewer lines)."""
    lines, inner = 0, None
    files = ("handles.py", "grouped_allreduce.py", "flat_buffers.py")

    def trace(frame, event, arg):
        nonlocal lines, inner
        lines += event == "line" and frame.f_code.co_filename.endswith(files)
        if event == "line" and lines == number and inner is None:
            sys.settrace(None)
            inner = hvd.synchronize(handle)
        return trace

    sys.settrace(trace)
    try:
        return hvd.synchronize(handle), inner
    finally:
        sys.settrace(None)


def wait_in_handlers():
    hvd.init()
    for kind in ("fused", "fused, named", "allgather", "gathered"):
        number, inner = 0, True
        while inner is not None:
            number += 1
            handle = BEGINS[kind](3)
            while not hvd.poll(handle):
                pass
            outer, inner = waits_again_at(number, handle)
            assert inner is None or inner is outer, (kind, number)
            assert hvd.synchronize(handle) is outer, (kind, number)
            assert outer[0].eq(3).all(), (kind, number)
        assert number > 10


@pytest.mark.ranks(1)
@pytest.mark.mpis("openmpi")
def test_a_signal_handler_that_waits_once_more_at_any_line_gets_the_same_object(world):
    world.run(wait_in_handlers)
