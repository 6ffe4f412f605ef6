"""An engine's memory does not grow with the number of operations that it has done."""

import ctypes
import gc
import os
import tracemalloc
import weakref

import psutil
import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds

ROUNDS = 300


def operations(name):
    """One of each kind, of sizes that take each way; 12 operations."""
    size = hvd.size()
    for elems in (3, 3000):
        x = torch.ones(elems)
        hvd.allreduce(x, op=hvd.Sum, name=name)
        hvd.allreduce(x, op=hvd.Adasum, name=f"{name}.adasum")
        hvd.broadcast(x, 0, name=name)
        hvd.allgather(x, name=name)
        hvd.alltoall(torch.ones(elems * size), name=name)
    hvd.allreduce_async(torch.ones(5))  # nobody waits for it
    hvd.barrier()


def resident_bytes():
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss


def growth():
    """Bytes per operation, between a warm engine and one that has done many more."""
    hvd.init()
    sizes = []
    for batch in range(4):
        for i in range(ROUNDS):
            operations(f"{batch}.{i}")  # never the same name
        sizes.append(resident_bytes())
    hvd.barrier()
    return (sizes[-1] - sizes[1]) / (2 * ROUNDS * 12)


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
def test_memory_does_not_grow_with_the_operations_done(world):
    # An operation's own record is half a kilobyte: were one in ten kept, this would show.
    assert max(world.run(growth, limit_s=120)) < 50


NAMES = 5000


def used_bytes():
    """Bytes of Python's objects, and of everything else from malloc."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    return tracemalloc.get_traced_memory()[0], libc.mallinfo2().uordblks


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (field, ctypes.c_size_t)
        for field in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    ]


def groups(batch):
    x, y = torch.ones(3), torch.ones(30_000)
    for i in range(NAMES):
        name = f"{batch} {i}"
        hvd.synchronize(hvd.grouped_allreduce_async_([x, x], name=name))
        if i % 10 == 0:  # of several operations
            hvd.grouped_allreduce_([x, y], name=f"{name} two")
            hvd.grouped_allgather([x, x], name=name)
            hvd.grouped_reducescatter([x, x], name=name)


def growth_of_tables(repeat):
    """Bytes kept per name, by Python's objects and by others."""
    hvd.init()
    repeat("warm")
    tracemalloc.start()
    before = used_bytes()
    repeat("more")
    after = used_bytes()
    tracemalloc.stop()
    hvd.barrier()
    return [(now - then) / NAMES for now, then in zip(after, before, strict=True)]


@pytest.mark.wide_in("openmpi", 2)  # the tables of names lie above MPI
@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_a_group_that_has_ended_leaves_nothing_under_its_name(world):
    for python, others in world.run(growth_of_tables, groups, limit_s=120):
        # A name and its place in a table are more than 100 bytes.
        assert python < 10
        assert others < 10


class Owner:
    """Of the buffers of a plan."""


def owners_left(when):
    """How many buffers of plans live on: of a plan that only rank 0 makes, or that all make."""
    from mpi4py import MPI

    kept = None
    hvd.init()
    if hvd.rank() == 0 or when == "made":
        owner, x = Owner(), torch.ones(10)
        kept = weakref.ref(owner)
        plan = worlds.current().team.engine.plan(
            "p", _core.FLOAT32, _core.SUM, x.data_ptr(), x.data_ptr(), 10, 1.0, 1.0, owner
        )
        if when == "made":
            assert plan.start(owner).wait() is None
        if when == "released before":
            del plan
        hvd.shutdown()  # on several hosts it waits 2.4 s for the others, who are in MPI
        plan = owner = None
    MPI.COMM_WORLD.Barrier()
    hvd.shutdown()
    gc.collect()
    return int(kept is not None and kept() is not None)


@pytest.mark.wide_in("openmpi")
@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("when", ["released before", "released after", "made"])
def test_what_a_plan_holds_is_given_back_when_the_engine_is_closed(world, when):
    assert world.run(owners_left, when) == [0] * world.size
