"""How transfers end that go wrong, and how queues end."""

import contextlib
import os
import random
import signal
import threading

import pytest
import torch

import hvdlite as hvd
from tests.gpu.stand_in import HostDevices, allreduce, new_queue, queue_for, request, result_of
from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.worlds import MPIS, mpiexec_command, python_of

several = pytest.mark.ranks(2, 3)
routes = pytest.mark.parametrize("route", ["group", "staged"])


class Faulty(HostDevices):
    """Its group raises at the operation of this number on some ranks; 0 is the attempt."""

    def __init__(self, operation, ranks):
        super().__init__()
        self.operation, self.ranks = operation, ranks

    def group(self, store, rank, size, device):
        group = super().group(store, rank, size, device)
        return Raising(group, self.operation) if rank in self.ranks else group


class Raising:
    def __init__(self, group, operation):
        self._group = group
        self._left = operation

    def allreduce(self, tensors, options):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("out of paper\nand a stack of C++")
        return self._group.allreduce(tensors, options)


def fail_to_launch(ranks):
    """The third transfer fails to launch on these ranks."""
    queue = new_queue("group", Faulty(3, ranks))
    names = ("good", "also good", "bad", "behind it")
    transfers = [allreduce(queue, name, torch.ones(3)) for name in names]
    texts = [transfer.wait() for transfer in transfers]
    texts.append(allreduce(queue, "later", torch.ones(3)).wait())
    # The engine itself is as before.
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    return texts


@several
def test_a_launch_that_fails_names_the_operation_and_the_rank_and_breaks_the_queue(world):
    for rank, texts in enumerate(world.run(fail_to_launch, list(range(world.size)))):
        cause = f"allreduce 'bad': failed on rank {rank}: RuntimeError: out of paper"
        assert texts == [
            None,
            None,
            cause,
            *(
                f"allreduce '{name}': the GPU queue of rank {rank} is broken by an earlier "
                f"failure: {cause}"
                for name in ("behind it", "later")
            ),
        ]


@several
def test_a_launch_that_fails_on_one_rank_fails_on_all(world):
    every = world.run(fail_to_launch, [1])
    for rank, texts in enumerate(every):
        assert texts[:2] == [None, None]
        assert f"allreduce 'bad': failed on rank {rank}: RuntimeError: " in texts[2]
        assert all("broken by an earlier failure: allreduce 'bad'" in text for text in texts[3:])


class Unusable(HostDevices):
    """Devices with an unexpected fault."""

    def identity(self, device):
        raise KeyError("device")


def meet_a_fault_of_the_queue():
    queue = new_queue("group", Unusable())
    texts = [allreduce(queue, name, torch.ones(3)).wait() for name in ("first", "second")]
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    return texts


@several
def test_a_fault_of_the_gpu_queue_itself_ends_what_is_in_it(world):
    for rank, texts in enumerate(world.run(meet_a_fault_of_the_queue)):
        for name, text in zip(("first", "second"), texts, strict=True):
            queue = f"the GPU queue of rank {rank}"
            assert text == f"allreduce '{name}': {queue} has failed: KeyError: 'device'"


class Cramped(HostDevices):
    """Devices without memory for staging large tensors."""

    def host_buffer(self, num_bytes):
        if num_bytes > 4096:
            raise MemoryError("no pinned memory")
        return super().host_buffer(num_bytes)


def stage_too_much():
    queue = new_queue("staged", Cramped())
    texts = [allreduce(queue, name, torch.ones(n)).wait() for name, n in (("a", 3), ("b", 3000))]
    assert result_of(allreduce(queue, "c", torch.ones(3))).tolist() == [hvd.size()] * 3
    return texts


@several
def test_what_fails_while_it_is_staged_fails_alone(world):
    for rank, texts in enumerate(world.run(stage_too_much)):
        assert texts == [
            None,
            f"allreduce 'b': failed on rank {rank}: MemoryError: no pinned memory",
        ]


def leave_something_pending(route):
    queue = new_queue(route)
    threads = threading.active_count()
    assert result_of(allreduce(queue, "before", torch.ones(3))).tolist() == [hvd.size()] * 3
    assert threading.active_count() >= threads
    if hvd.rank() == 0:
        transfer = allreduce(queue, "never", torch.ones(3))
        waiting = threading.Thread(target=transfer.wait)
        waiting.start()
        hvd.shutdown()
        waiting.join(20.0)
        assert not waiting.is_alive()
        text = transfer.wait()
        with pytest.raises(ValueError, match=r"init\(\) first"):
            hvd.allreduce(torch.ones(1))
    else:
        # An operation that needs a rank that leaves fails, whether the rank leaves before or after.
        text = allreduce(queue, "needs rank 0", torch.ones(3)).wait()
        hvd.shutdown()
    assert not any(thread.name == "hvdlite-gpu-queue" for thread in threading.enumerate())
    queue = new_queue(route)
    assert result_of(allreduce(queue, "again", torch.ones(3))).tolist() == [hvd.size()] * 3
    return text


@several
@routes
def test_shutdown_fails_what_is_pending_and_init_works_again(world, route):
    own, *others = world.run(leave_something_pending, route)
    assert own == "rank 0 called shutdown before the operation had ended"
    for text in others:
        assert "rank 0 on " in text
        assert "has left" in text


def leave_at_any_time(route, seed):
    """Transfers that are started, and a shutdown that waits for none of them."""
    done = []
    chance = random.Random(seed + 100 * hvd.rank() if hvd.is_initialized() else seed)
    for _ in range(3):
        queue = new_queue(route)
        tensors = [torch.full((n,), float(hvd.rank())) for n in (3, 30_000, 5)]
        transfers = [
            queue.start(request("allreduce", f"t{i}", t, "Sum"), t, torch.empty_like(t))
            for i, t in enumerate(tensors)
        ]
        ones = torch.ones(hvd.size(), dtype=torch.int64)
        rows = torch.full((hvd.size(), 2), float(hvd.rank()))
        transfers.append(queue.start(request("alltoall", "rows", rows, splits=ones), rows, None))
        for _ in range(chance.randrange(200)):
            transfers[0].poll()
        total = hvd.size() * (hvd.size() - 1) / 2
        hvd.shutdown()
        texts = [transfer.wait() for transfer in transfers]
        for text, transfer in zip(texts[:3], transfers, strict=False):
            assert text is not None or transfer.value().eq(total).all()
        done.append([text is None for text in texts])
    return done


@several
@pytest.mark.hosts("1,1", "2,1")
@routes
def test_what_is_agreed_on_when_ranks_leave_ends_alike_on_all(world, route):
    every = world.run(leave_at_any_time, route, 1)
    assert all(done == every[0] for done in every), every


def wait_and_be_interrupted(route):
    queue = new_queue(route)

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    if hvd.rank() == 0:
        former = signal.signal(signal.SIGUSR2, interrupt)
        transfer = allreduce(queue, "x", torch.ones(3))
        main = threading.main_thread().ident
        seen = threading.Event()

        def send():
            while not seen.wait(0.02):
                with contextlib.suppress(ProcessLookupError):
                    signal.pthread_kill(main, signal.SIGUSR2)

        sender = threading.Thread(target=send)
        try:
            sender.start()
            transfer.wait()
            raise AssertionError("not interrupted")
        except Interrupted:
            seen.set()
        finally:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            seen.set()
            sender.join()
            signal.signal(signal.SIGUSR2, former)
    hvd.barrier()
    if hvd.rank() != 0:
        transfer = allreduce(queue, "x", torch.ones(3))
    while not transfer.poll():  # it goes on by itself
        pass
    assert result_of(transfer).tolist() == [hvd.size()] * 3


@several
@routes
def test_a_wait_can_be_interrupted_and_the_transfer_goes_on(world, route):
    world.run(wait_and_be_interrupted, route)


def use_it_in_a_forked_child():
    queue = new_queue("group")
    assert result_of(allreduce(queue, "x", torch.ones(3))).tolist() == [hvd.size()] * 3
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            allreduce(queue, "y", torch.ones(3))
            os.write(write, b"no error")
        except BaseException as error:
            os.write(write, str(error).encode())
        finally:
            hvd.shutdown()  # harms nobody
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    text = os.read(read, 10000).decode()
    os.close(read)
    assert result_of(allreduce(queue, "y", torch.ones(3))).tolist() == [hvd.size()] * 3
    return text


@pytest.mark.ranks(2)
def test_in_a_forked_child_it_refuses(world):
    for rank, text in enumerate(world.run(use_it_in_a_forked_child)):
        assert f"this process was forked from rank {rank}" in text


def remove_a_set_with_something_pending():
    new_queue("group")
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 1])
    text = None
    if pair.included():
        queue = queue_for(pair, "group")
        transfer = allreduce(queue, "pending", torch.ones(3)) if rank == 0 else None
    hvd.remove_process_set(pair)
    if rank == 0:
        text = transfer.wait()
    hvd.barrier()
    return text


@pytest.mark.ranks(3)
def test_what_is_pending_in_a_process_set_that_is_removed_fails(world):
    text, *_ = world.run(remove_a_set_with_something_pending)
    # Either may be first.
    assert "rank 0 called shutdown" in text or "rank 1 on " in text


# Ranks that end, each in a process of its own.

PRELUDE = """
import sys, torch, hvdlite as hvd
from tests.gpu.stand_in import new_queue, allreduce, result_of
queue = new_queue("group")
assert result_of(allreduce(queue, "x", torch.ones(3))).tolist() == [hvd.size()] * 3
"""


def run(mpi, code):
    if not (python_of(mpi).parent / "mpiexec").exists():
        lacking(f"no {mpi}; `make build`")
    return run_program([*mpiexec_command(mpi, 2), python_of(mpi), "-c", PRELUDE + code], 60)


@pytest.mark.wide_in("mpich")
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param("", 0, id="idle", marks=pytest.mark.wide),
        # All members agree on it, and none waits for it.
        pytest.param(
            "allreduce(queue, 'last', torch.ones(1_000_000))",
            0,
            id="under way",
            marks=pytest.mark.wide,
        ),
        pytest.param("if not hvd.rank(): allreduce(queue, 'p', torch.ones(1))", 0, id="pending"),
        pytest.param(
            "if hvd.rank(): allreduce(queue, 'p', torch.ones(1)); sys.exit(3)", 3, id="failing"
        ),
        pytest.param(
            "if hvd.rank(): allreduce(queue, 'p', torch.ones(1)); raise KeyError('boom')",
            1,
            id="raising",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_a_rank_with_a_gpu_queue_ends_as_it_should(mpi, code, expected):
    finished = run(mpi, code)
    assert finished.code == expected, finished
    assert "Fatal Python error" not in finished.stderr


@pytest.mark.wide_in("openmpi")
@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_ends_with_a_transfer_pending_is_missed_by_the_others(mpi):
    finished = run(
        mpi,
        "if hvd.rank(): print('text:', allreduce(queue, 'q', torch.ones(1)).wait())\n"
        "else: allreduce(queue, 'p', torch.ones(1))",
    )
    assert finished.code == 0, finished
    assert "rank 0 on " in finished.find(r"^text: (.*)$")
    assert "has left" in finished.find(r"^text: (.*)$")
