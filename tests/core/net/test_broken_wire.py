"""An MPI error in any message fails the operations in flight, on every rank, and nothing else."""

import gc
import time
import weakref

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from tests.core import limits
from tests.harness.mpi_sends import send_through

_MPI_ERR_OTHER = 15


class FailingWire:
    """MPI's sends, one of which fails. Engines made while it is patched in send through it."""

    def __init__(self, monkeypatch, failing):
        self.sends = 0

        def isend(real, arguments):
            self.sends += 1
            return _MPI_ERR_OTHER if self.sends == failing else real(*arguments)

        send_through(monkeypatch, isend)


def fail_a_send(failing, sender):
    from mpi4py import MPI

    with pytest.MonkeyPatch.context() as monkeypatch:
        wire = FailingWire(monkeypatch, failing if MPI.COMM_WORLD.Get_rank() == sender else 0)
        hvd.init()
    x = torch.ones(3000)
    plan = worlds.current().team.engine.plan(
        "p", _core.FLOAT32, _core.SUM, x.data_ptr(), x.data_ptr(), 3000, 1.0, 1.0, x
    )
    texts = []
    for _ in range(2):
        handles = [hvd.allreduce_async(torch.ones(2000), name=f"large {i}") for i in range(4)]
        handles += [hvd.allreduce_async(torch.ones(2), name=f"tiny {i}") for i in range(4)]
        handles.append(hvd.allgather_async(torch.ones(700)))
        handles.append(hvd.alltoall_async(torch.ones(700 * hvd.size())))
        handles.append(hvd.allreduce_async(torch.ones(500), name="adasum", op=hvd.Adasum))
        for _ in range(2):
            if text := plan.start(x).wait():
                texts.append(text)
        for handle in handles:
            try:
                hvd.synchronize(handle)
            except hvd.HorovodInternalError as error:
                texts.append(str(error))
    failed = wire.sends >= failing
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    return failed, texts


def fail_a_send_to_who_has_joined(failing, sender):
    from mpi4py import MPI

    with pytest.MonkeyPatch.context() as monkeypatch:
        wire = FailingWire(monkeypatch, failing if MPI.COMM_WORLD.Get_rank() == sender else 0)
        hvd.init()
    x = torch.ones(20)
    plan = worlds.current().team.engine.plan(
        "p", _core.FLOAT32, _core.SUM, x.data_ptr(), x.data_ptr(), 20, 1.0, 1.0, x
    )
    texts = []
    if text := plan.start(x).wait():
        texts.append(text)
    for _ in range(6 if hvd.rank() else 0):  # the others join first, or meanwhile
        if text := plan.start(x).wait():
            texts.append(text)
        time.sleep(0.002)
    try:
        hvd.join()
    except hvd.HorovodInternalError as error:
        texts.append(str(error))
    failed = wire.sends >= failing
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    return failed, texts


@pytest.mark.ranks
@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.parametrize("failing", range(1, 21))
@pytest.mark.parametrize("case", [fail_a_send, fail_a_send_to_who_has_joined])
def test_a_send_that_fails_ends_every_operation(world, case, failing):
    every = world.run(case, failing, world.size - 1, knobs=limits.KNOBS["tiny knobs"])
    if every[-1][0]:
        assert any("MPI reported an error" in text for text in every[-1][1])


def fail_a_send_and_let_go(failing):
    from mpi4py import MPI

    with pytest.MonkeyPatch.context() as monkeypatch:
        wire = FailingWire(monkeypatch, failing if MPI.COMM_WORLD.Get_rank() == 1 else 0)
        hvd.init()
    x = torch.ones(2000)
    seen = weakref.ref(x)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce_(x)
    del x
    gc.collect()
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    return wire.sends >= failing, seen() is None


@pytest.mark.ranks
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("failing", [3, 4, 5])
def test_what_has_been_sent_when_a_later_send_fails_is_let_go(world, failing):
    assert world.run(fail_a_send_and_let_go, failing, knobs=limits.TINY)[1] == (True, True)
