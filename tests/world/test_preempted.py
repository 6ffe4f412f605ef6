"""hvd.preempted: a signal to any rank is known to all ranks in the same step."""

import contextlib
import ctypes
import logging
import os
import signal
import threading

import pytest
import torch

import hvdlite as hvd
from hvdlite import preemption
from hvdlite.world.process import c_handlers
from hvdlite.world.telling import logs
from tests.harness.programs import run_program
from tests.harness.worlds import python_of

SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


@contextlib.contextmanager
def as_if_never_called():
    """Before and after, this process has no notice, and its own handlers."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    preemption._notice = None
    try:
        yield
    finally:
        preemption._notice = None
        for number, handler in former.items():
            signal.signal(number, handler)


def answers(number, at, target):
    """What six calls give, if the target gets the signal before the call `at`."""
    hvd.init()
    found = []
    with as_if_never_called():
        for step in range(6):
            if step == at and hvd.rank() == target:
                signal.raise_signal(number)
            found.append(hvd.preempted())
    return found


@pytest.mark.parametrize("number", SIGNALS, ids=str)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1")
def test_all_ranks_are_told_in_the_call_after_the_signal_to_one_and_from_then_on(world, number):
    target = world.size - 1
    assert world.run(answers, number, 2, target) == [[False] * 2 + [True] * 4] * world.size


def in_a_collective():
    """Rank 0 gets the signal while it waits for rank 1 in an allreduce."""
    hvd.init()
    with as_if_never_called():
        before = hvd.preempted()
        if hvd.rank():
            # Rank 0 is in the allreduce, or comes to it: the signal interrupts neither.
            os.kill(hvd.broadcast_object(None), signal.SIGTERM)
        else:
            hvd.broadcast_object(os.getpid())
        total = hvd.allreduce(torch.ones(1000) * (1 + hvd.rank()), op=hvd.Sum)
        return before, total.unique().tolist(), hvd.preempted()


@pytest.mark.ranks(2)
def test_a_signal_breaks_no_collective(world):
    assert world.run(in_a_collective) == [(False, [3.0], True)] * 2


def with_handlers():
    hvd.init()
    said = []
    with as_if_never_called():
        signal.signal(signal.SIGTERM, lambda number, frame: said.append(("before", number)))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        hvd.preempted()
        ours = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *given: (said.append("after"), ours(*given)))
        hvd.preempted()
        signal.raise_signal(signal.SIGUSR2)
        found = [hvd.preempted()]
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        return said, [*found, hvd.preempted()]


@pytest.mark.ranks(2)
def test_the_scripts_own_handlers_are_called_and_what_it_ignores_stays_so(world):
    expected = ([("before", signal.SIGTERM), "after"], [False, True])
    assert world.run(with_handlers) == [expected] * 2


def in_c_with_more_than_a_number():
    """What a library may have installed: a handler with SA_SIGINFO. Nothing sends the signal."""
    action = c_handlers._Action()
    action.handler = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p)
    action.flags = c_handlers._SA_SIGINFO
    said = []
    hvd.init()
    with as_if_never_called():
        ctypes.CDLL(None).sigaction(signal.SIGUSR2, ctypes.byref(action), None)
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logs.log.addHandler(handler)
        hvd.preempted()
        hvd.preempted()
        logs.log.removeHandler(handler)
    return said


@pytest.mark.ranks(1)
def test_a_handler_in_c_that_can_not_be_called_is_named(world):
    ((said,),) = world.run(in_c_with_more_than_a_number)
    assert said == (
        "hvd.preempted() takes SIGUSR2 from a handler that a library has installed in C; install"
        " that after the first call of preempted(), and let it call the one before"
    )


def after_a_join():
    """Rank 1 joins at once; rank 0 is told meanwhile, and tells rank 1 in the next call."""
    hvd.init()
    with as_if_never_called():
        found = [hvd.preempted()]
        if hvd.rank() == 0:
            signal.raise_signal(signal.SIGUSR1)
            found.append(hvd.preempted())
        else:
            # A signal to a rank that has joined is known once it calls again.
            found.append(None)
        hvd.join()
        found.append(hvd.preempted())
        return found


@pytest.mark.ranks(2)
def test_a_rank_that_has_joined_is_told_when_it_calls_again(world):
    assert world.run(after_a_join) == [[False, True, True], [False, None, True]]


def from_a_thread():
    hvd.init()
    found = []

    def call():
        try:
            found.append(hvd.preempted())
        except RuntimeError as error:
            found.append(str(error))

    def in_a_thread():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with as_if_never_called():
        in_a_thread()
        hvd.preempted()
        in_a_thread()
    return found


@pytest.mark.ranks(2)
def test_the_first_call_is_in_the_main_thread_and_later_ones_in_any(world):
    (refused, answer), other = world.run(from_a_thread)
    assert other == [refused, answer]
    assert refused == (
        "hvd.preempted(): its first call installs signal handlers, which Python allows only in the"
        " main thread; call it there once, before other threads call it"
    )
    assert answer is False


def before_init():
    hvd.shutdown()
    with pytest.raises(ValueError, match="init"):
        hvd.preempted()


@pytest.mark.ranks(1)
def test_before_init_it_is_a_value_error(world):
    world.run(before_init)


ALONE = """
import multiprocessing, os, signal, sys, time
import hvdlite as hvd
hvd.init()
assert "mpi4py" not in sys.modules
assert not hvd.preempted()
fork = multiprocessing.get_context("fork")
child = fork.Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join()
assert child.exitcode == -signal.SIGTERM, child.exitcode
child = fork.Process(target=signal.raise_signal, args=(signal.SIGUSR1,))
child.start()
child.join()
assert child.exitcode == 0, child.exitcode
assert not hvd.preempted()
os.kill(os.getpid(), signal.SIGTERM)
assert hvd.preempted()
print("left in order")
"""


def test_it_works_alone_without_mpi_and_children_end_at_term():
    done = run_program([python_of("mpich"), "-c", ALONE], 60.0)
    assert (done.code, done.stdout) == (0, "left in order\n"), done
