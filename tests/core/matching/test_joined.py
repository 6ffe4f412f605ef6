"""A rank that has joined, and plans, roots and steps that are under way meanwhile.

Which rank joins first is made sure by MPI's barrier, which the engine knows nothing of.
"""

import os
import random
import signal
import threading
import time

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds

JOINED = "has joined, and a joined rank takes part only in allreduce and barrier"


def everyone():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def plan_of(tensor, name, form=_core.PLAN_WHOLE):
    return worlds.current().team.engine.plan(
        name,
        _core.FLOAT32,
        _core.SUM,
        tensor.data_ptr(),
        tensor.data_ptr(),
        tensor.numel(),
        1.0,
        1.0,
        tensor,
        form=form,
    )


def plan_while_one_has_joined():
    hvd.init()
    failure = None
    everyone().Barrier()
    if hvd.rank():
        tensor = torch.ones(10_000)
        plan = plan_of(tensor, "late plan")
        failure = plan.start(tensor).wait()
        del plan
    hvd.join()
    return failure


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_a_plan_that_a_joined_rank_does_not_make_fails_on_the_others(world):
    failures = world.run(plan_while_one_has_joined)[1:]
    assert all(JOINED in failure and "rank 0 on " in failure for failure in failures)


def broadcast_from_a_joined_root():
    hvd.init()
    failure = None
    everyone().Barrier()
    if hvd.rank():
        for count in (3, 30_000):
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.broadcast(torch.ones(count), 0, name="from nobody")
            failure = str(caught.value)
    hvd.join()
    return failure


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1", "1,2")
def test_a_broadcast_from_a_joined_root_fails_on_the_others(world):
    for failure in world.run(broadcast_from_a_joined_root)[1:]:
        assert JOINED in failure


def join_with_a_run_that_waits_for_its_plan(rounds):
    hvd.init()
    size = hvd.size()
    for i in range(rounds):
        tensor = torch.full((50_000,), hvd.rank() + 1.0)
        if hvd.rank():
            everyone().Barrier()  # the first run is posted before its plan can be made
        plan = plan_of(tensor, f"waited for {i}")
        run = plan.start(tensor)
        if not hvd.rank():
            everyone().Barrier()
        else:
            assert run.wait() is None
        hvd.join()
        assert run.wait() is None
        assert tensor[0] == size * (size + 1) / 2
        del run, plan


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1", "2,1")
def test_a_run_that_was_started_before_join_counts_with_its_data(world):
    world.run(join_with_a_run_that_waits_for_its_plan, 10)


def run_a_plan_that_one_has_dropped():
    hvd.init()
    tensor = torch.ones(100_000)
    plan = plan_of(tensor, "dropped")
    assert plan.start(tensor).wait() is None
    everyone().Barrier()
    if hvd.rank() == 0:
        del plan
    else:
        for _ in range(3):
            tensor.fill_(1.0)
            assert plan.start(tensor).wait() is None
            assert tensor[-1] == hvd.size() - 1
        del plan
    hvd.join()
    # Tags and numbers are free again, and another plan may have them.
    again = torch.ones(100_000)
    assert plan_of(again, "another").start(again).wait() is None
    assert again[0] == hvd.size()


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "1,1,1", "2,1")
def test_the_others_can_run_a_plan_that_a_joined_rank_has_dropped(world):
    world.run(run_a_plan_that_one_has_dropped)


def adasum_over_a_join(rounds):
    hvd.init()
    pauses = random.Random(hvd.rank())
    ones = torch.ones(20_000)
    for i in range(rounds):
        handle = None
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(ones, name=f"over {i}", op=hvd.Adasum)
            for _ in range(pauses.randrange(3)):
                hvd.poll(handle)
        hvd.join()
        if handle is not None:
            assert torch.equal(hvd.synchronize(handle), ones)


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1", "1,2")
def test_an_adasum_may_end_after_all_have_joined(world):
    world.run(adasum_over_a_join, 60)


def names_again_after_join(rounds):
    hvd.init()
    x = torch.ones(500_000)
    for _ in range(rounds):
        if hvd.rank() == 0:
            hvd.allreduce(x, name="again", op=hvd.Sum)
        hvd.join()
        assert hvd.allreduce(x, name="again", op=hvd.Sum)[-1] == hvd.size()


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
def test_a_name_is_free_when_join_returns(world):
    world.run(names_again_after_join, 10, knobs={"HVDLITE_BLOCK_BYTES": "1048576"})


def join_in_turns(rounds):
    """Each epoch another rank runs out of data first; an epoch's news may come late."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.empty(3000)
    plan = plan_of(tensor, "in turns")
    for i in range(rounds):
        steps = [(i + other) % 3 for other in range(size)]
        for step in range(steps[rank]):
            tensor.fill_(rank + 1.0)
            assert plan.start(tensor).wait() is None
            assert tensor[0] == sum(r + 1 for r in range(size) if steps[r] > step), (i, step)
        last = hvd.join()
        assert steps[last] == max(steps)


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,2,1", "1,1,1")
def test_every_epoch_ends_before_the_next_begins(world):
    world.run(join_in_turns, 60)


def run_a_plan_with_one_that_stands_still(rounds):
    """Rank 1 has joined. It may have all of a run from rank 0, and still owe rank 2, which stands
    still now and then, some messages, when rank 0 begins the next run."""
    hvd.init()
    rank = hvd.rank()
    pids = everyone().allgather(os.getpid())
    tensor = torch.empty(3_000_000)
    plan = plan_of(tensor, "with one that stands still")
    over = threading.Event()

    def stop_now_and_then():
        while not over.wait(0.015):
            os.kill(pids[2], signal.SIGSTOP)
            time.sleep(0.02)
            os.kill(pids[2], signal.SIGCONT)

    wrong = 0
    everyone().Barrier()
    if rank != 1:
        stopper = threading.Thread(target=stop_now_and_then)
        if rank == 0:
            stopper.start()
        for i in range(rounds):
            tensor.fill_(i + 1.0)
            assert plan.start(tensor).wait() is None
            wrong += int((tensor != 2 * (i + 1)).sum())
        over.set()
        if rank == 0:
            stopper.join()
    hvd.join()
    assert not wrong


@pytest.mark.ranks
@pytest.mark.hosts("1,1,1")
def test_a_joined_host_ends_one_run_of_a_plan_before_it_begins_the_next(world):
    world.run(run_a_plan_with_one_that_stands_still, 30)


def join_and_leave_at_once(rounds):
    for _ in range(rounds):
        hvd.init()
        everyone().Barrier()
        if hvd.rank() < hvd.size() - 1:
            hvd.allreduce(torch.ones(300_000), name="while the last one has joined")
        hvd.join()
        hvd.shutdown()
        everyone().Barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1,1", "2,1")
def test_a_join_that_has_succeeded_does_not_fail_as_others_leave(world):
    world.run(join_and_leave_at_once, 25)
