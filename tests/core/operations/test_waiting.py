"""Waiting for an operation with a limit, which ranks are missing, and giving up."""

import threading

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.hosts("1,1", "2,2", "3,1", "1,3")]

SITE = "train.py:12"


def everyone():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def engine():
    return worlds.current().team.engine


def posting_of(name, count=3):
    tensor = torch.full((count,), 1.0)
    return _core.posting(
        _core.ALLREDUCE, name, True, _core.FLOAT32, tensor, tensor, _core.SUM, site=SITE
    )


def text_of_timeout(call, **arguments):
    with pytest.raises(TimeoutError) as caught:
        call(**arguments)
    return str(caught.value)


def wait_for_a_late_rank(late, how):
    """The ranks but `late` wait for it with a limit; then it calls the operation, too."""
    hvd.init()
    posting = posting_of("late")
    text = None
    if hvd.rank() != late:
        if how == "run":
            text = text_of_timeout(lambda: engine().run(posting, 0.05))
        else:
            operation = engine().post(posting)
            everyone().Barrier()  # else one that is slow is missing too
            text = text_of_timeout(operation.wait, timeout_s=0.05)
            assert not operation.poll()
    elif how == "wait":
        everyone().Barrier()
    everyone().Barrier()
    if hvd.rank() == late or how == "run":
        # Of a run nobody holds the operation: it ends with the late rank's, here with all others'.
        if hvd.rank() == late:
            assert engine().run(posting) is None
    else:
        assert operation.wait() is None
        assert operation.wait(timeout_s=0.0) is None
    everyone().Barrier()
    assert engine().run(posting_of("next"), timeout_s=60.0) is None
    return text


@pytest.mark.parametrize("late", [0, 1])
def test_a_timeout_names_the_rank_that_has_not_called_it(world, late):
    results = world.run(wait_for_a_late_rank, late, "wait")
    for rank, text in enumerate(results):
        if rank == late:
            continue
        assert text.startswith(f"allreduce 'late' ({SITE}) has not ended within 0.05 s: ")
        assert f": rank {late} on " in text
        assert text.endswith(" has not called it")


def test_run_has_the_same_limit(world):
    for rank, text in enumerate(world.run(wait_for_a_late_rank, 1, "run")):
        assert rank == 1 or ": rank 1 on " in text


def call_alone():
    hvd.init()
    text = None
    if hvd.rank() == 0:
        operation = engine().post(posting_of("alone"))
        text = text_of_timeout(operation.wait, timeout_s=0.0)
    everyone().Barrier()
    if hvd.rank():
        operation = engine().post(posting_of("alone"))
    assert operation.wait() is None
    return text


def test_all_ranks_that_have_not_called_it_are_named(world):
    text = world.run(call_alone)[0]
    assert all(f"rank {rank} on " in text for rank in range(1, world.size)), text


def give_up_while_others_wait(giver):
    hvd.init()
    engine = worlds.current().team.engine
    operations = []
    if hvd.rank() != giver:
        operations = [
            engine.post(posting_of(f"x{i}", count)) for i, count in enumerate((3, 99_999))
        ]
    everyone().Barrier()
    if hvd.rank() == giver:
        engine.give_up("the watchdog has had enough of 'x'")
        operations = [engine.post(posting_of("later"))]
    texts = {operation.wait() for operation in operations}
    texts.add(engine.run(posting_of("after that")))
    everyone().Barrier()
    hvd.shutdown()
    return texts


@pytest.mark.parametrize("giver", [0, 1, -1])
def test_giving_up_fails_everything_on_all_ranks_with_the_text(world, giver):
    for texts in world.run(give_up_while_others_wait, giver % world.size):
        assert texts == {"the watchdog has had enough of 'x'"}


def give_up_together():
    hvd.init()
    everyone().Barrier()
    engine().give_up(f"rank {hvd.rank()}")
    engine().give_up("again")
    text = engine().run(posting_of("x"))
    everyone().Barrier()
    hvd.shutdown()
    return text


def test_of_several_that_give_up_one_text_of_theirs_counts_on_each_host(world):
    texts = world.run(give_up_together)
    assert set(texts) <= {f"rank {rank}" for rank in range(world.size)}


def ask_from_many_threads():
    """While one thread drives, and the operation ends."""
    hvd.init()
    answers = []
    if hvd.rank() == 0:
        operation = engine().post(posting_of("asked"))
        threads = [
            threading.Thread(
                target=lambda: answers.append(text_of_timeout(operation.wait, timeout_s=0.0))
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    everyone().Barrier()
    if hvd.rank():
        operation = engine().post(posting_of("asked"))
    assert operation.wait() is None
    return answers


def test_many_threads_may_ask_at_once(world):
    answers = world.run(ask_from_many_threads)[0]
    assert len(answers) == 4
    assert all(f"rank {world.size - 1} on " in answer for answer in answers), answers


@pytest.mark.ranks(1)
@pytest.mark.hosts
def test_a_world_of_one(world):
    world.run(be_alone)


def be_alone():
    hvd.init()
    operation = engine().post(posting_of("x"))
    assert engine().run(posting_of("y"), 0.0) is None
    engine().give_up("enough")
    assert engine().run(posting_of("z")) == "enough"
    with pytest.raises(TypeError, match="wait has no argument 'limit'"):
        operation.wait(limit=3)
    with pytest.raises(ValueError, match="whose result the engine makes"):
        engine().run(_core.posting(_core.ALLGATHER, "g", True, _core.FLOAT32, torch.ones(3)))
    hvd.shutdown()
