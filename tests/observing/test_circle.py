"""Ranks that wait for each other in a circle are named; where nobody else could call what is
missing, they fail at once."""

import io
import re
import signal
import sys
import threading
import time

import pytest
import torch
import tqdm

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.harness.programs import run_program
from tests.observing.reports import FAILS, UNEVEN, WARNS, Said, plain

# No report, and no end, by the time that passes.
NEVER = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "1000"}
CERTAIN = (
    r": they wait in a circle, and no other thread can call what is missing; call the same "
    r"operations in the same order on every rank"
)


def text_of(call, *arguments, **options):
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call(*arguments, **options)
    return plain(str(caught.value))


def broadcast_against_allreduce():
    hvd.init()
    # The harness has none either; tqdm has one that does not count, once a bar was shown.
    tqdm.tqdm(range(1), file=io.StringIO()).close()
    assert {type(t).__module__ for t in threading.enumerate()} == {"threading", "tqdm._monitor"}
    if hvd.rank() == 0:
        text = text_of(hvd.broadcast, torch.ones(3), 0, name="grad")
    else:
        text = text_of(hvd.allreduce, torch.ones(3), name="grad")
    # The engine goes on, with the same names too.
    for _ in range(2):
        assert hvd.allreduce(torch.ones(3), name="grad", op=hvd.Sum).eq(hvd.size()).all()
        assert hvd.broadcast(torch.full((3,), 1.0 + hvd.rank()), 1, name="grad").eq(2).all()
    return text


@pytest.mark.ranks(2, 3)
def test_a_broadcast_against_an_allreduce_fails_at_once_on_all_ranks(world):
    texts = set(world.run(broadcast_against_allreduce, knobs=NEVER))
    expected = (
        r"rank 0 waits in broadcast 'grad' for rank [12], "
        r"which waits in allreduce 'grad' for rank 0"
    )
    assert len(texts) == 1, texts
    assert re.fullmatch(expected + CERTAIN, texts.pop())


ALONE = """
import signal
import hvdlite as hvd
from torch.utils.data import DataLoader
from hvdlite.world.process.alone import is_alone

def own_handler(number, frame):
    pass

hvd.init()
before = is_alone()
if BELOW:
    signal.signal(BELOW, own_handler)
assert not hvd.preempted()
loader = iter(DataLoader(range(100), num_workers=1))
next(loader)
assert not BELOW or signal.getsignal(BELOW) is not own_handler
print(before, is_alone())
signal.signal(signal.SIGUSR2, own_handler)
print(is_alone())
"""


@pytest.mark.parametrize("below", [None, signal.SIGCHLD, signal.SIGUSR1])
def test_only_handlers_of_the_script_could_call_what_is_missing(below):
    """A DataLoader and hvd.preempted() have threads and handlers that call no collective."""
    done = run_program(
        [sys.executable, "-c", f"BELOW = {below and int(below)}\n{ALONE}"], limit_s=60
    )
    assert (done.code, done.stdout) == (0, f"True {below is None}\nFalse\n"), done


def each_in_another():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    # Rank r has called all but the next one's.
    for r in range(size):
        if r not in (rank, (rank + 1) % size):
            hvd.allreduce_async(torch.ones(3), name=f"of {r}")
    text = text_of(hvd.allreduce, torch.ones(3), name=f"of {rank}")
    hvd.barrier()
    return text


@pytest.mark.ranks(3, 4)
def test_a_circle_of_all_ranks_fails_at_once(world):
    texts = set(world.run(each_in_another, knobs=NEVER))
    assert len(texts) == 1, texts
    (text,) = texts
    names = re.findall(r"waits in allreduce 'of (\d)' for rank (\d)", text)
    # Rank r has not called the operation of rank r + 1, which therefore waits for it.
    size = world.size
    assert names == [(str(-i % size), str((-i - 1) % size)) for i in range(size)]
    assert re.search(CERTAIN, text)


def runs_of_plans():
    from hvdlite import _core

    hvd.init()
    tensors = [torch.ones(2000), torch.ones(2000)]
    engine = worlds.current().team.engine
    plans = [
        engine.plan(name, _core.FLOAT32, _core.SUM, t.data_ptr(), t.data_ptr(), 2000, 1.0, 1.0, t)
        for name, t in zip("pq", tensors, strict=True)
    ]
    for plan, tensor in zip(plans, tensors, strict=True):
        assert plan.start(tensor).wait() is None
    own = hvd.rank() % 2
    text = plans[own].start(tensors[own]).wait()
    for plan, tensor in zip(plans, tensors, strict=True):
        assert plan.start(tensor).wait() is None
    return text


@pytest.mark.ranks(2)
def test_runs_of_plans_in_another_order_fail_at_once(world):
    first, second = world.run(runs_of_plans, knobs=NEVER)
    assert first == second
    assert "rank 0 waits in allreduce 'p' for rank 1, which waits in allreduce 'q' for" in first


def a_thread_calls_what_is_missing():
    """The main threads wait in a circle until it is named; then a thread of rank 0 ends it."""
    hvd.init()
    said = Said()
    rank = hvd.rank()

    def call_later():
        said.wait_for_line(".*: a circle; .*")
        hvd.allreduce(torch.ones(3), name="other", op=hvd.Sum)

    if rank == 0:
        thread = threading.Thread(target=call_later)
        thread.start()
        found = hvd.broadcast(torch.ones(3), 0, name="grad")
        thread.join()
    else:
        hvd.allreduce(torch.ones(3), name="other", op=hvd.Sum)
        found = hvd.broadcast(torch.zeros(3), 0, name="grad")
    assert found.eq(1).all()
    return [line for line in said.lines() if "circle" in line]


@pytest.mark.ranks(2)
def test_a_circle_that_another_thread_can_end_is_named_and_goes_on(world):
    lines, _ = world.run(a_thread_calls_what_is_missing, knobs=WARNS)
    (line,) = lines
    assert line == (
        "hvdlite: rank 0 waits in broadcast 'grad' for rank 1, which waits in allreduce 'other' "
        "for rank 0: a circle; call the same operations in the same order on every rank"
    )


def two_optimizers_against_an_allreduce():
    """Rank 0 waits in a backward that reaches both; a thread of it ends the circle."""
    hvd.init()
    said = Said()
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0)) for param in params]

    def step():
        (params[0] * params[1]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def call_later():
        said.wait_for_line(".*: a circle; .*")
        hvd.allreduce(torch.ones(3), name="other")

    step()
    if hvd.rank() == 0:
        thread = threading.Thread(target=call_later)
        thread.start()
        step()
        thread.join()
    else:
        hvd.allreduce(torch.ones(3), name="other")
        step()
    return [line for line in said.lines() if "circle" in line]


@pytest.mark.ranks(2)
def test_a_circle_of_a_backward_that_reaches_two_optimizers_is_named(world):
    lines, _ = world.run(two_optimizers_against_an_allreduce, knobs=WARNS)
    (line,) = lines
    assert re.fullmatch(
        r"hvdlite: rank 0 waits in the reduction of the gradients of parameter 0 \(bucket 1 of 1 of"
        r" the SGD optimizer(, DistributedOptimizer no\. 2)?\) for rank 1, which waits in allreduce"
        r" 'other' for rank 0: a circle; call the same operations in the same order on every rank; "
        rf"{UNEVEN}",
        line,
    )


def a_batch_more_against_the_next_epoch():
    hvd.init()
    for _ in range(2):
        hvd.allreduce(torch.ones(3), name="loss")
    if hvd.rank() == 0:
        return text_of(hvd.allreduce, torch.ones(3), name="loss")
    return text_of(hvd.barrier, name="next epoch")


@pytest.mark.ranks(2)
def test_a_circle_with_an_allreduce_of_one_more_batch_asks_for_the_batches(world):
    first, second = world.run(a_batch_more_against_the_next_epoch, knobs=NEVER)
    assert first == second
    assert re.fullmatch(
        f"rank 0 waits in allreduce 'loss' for rank 1, .*{CERTAIN}; {UNEVEN}", first
    )


def a_layer_thawed_on_one_rank():
    hvd.init()
    torch.manual_seed(1)
    said, torch_model = Said(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    named = list(torch_model.named_parameters())
    torch_model[1].requires_grad_(False)
    plain = torch.optim.SGD(torch_model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named)
    texts = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 3 and hvd.rank() == 1:
            torch_model[1].requires_grad_(True)
        try:
            torch_model(torch.ones(2)).sum().backward()
            optimizer.step()
        except hvd.HorovodInternalError as error:
            texts.append(str(error))
    return texts, said.lines()


@pytest.mark.ranks(2)
def test_a_layer_that_one_rank_alone_has_thawed_is_told_by_its_parameters(world):
    found = world.run(a_layer_thawed_on_one_rank, knobs=FAILS)
    for (text,), lines in found:
        # Whichever operation was late first.
        assert "requires_grad" in text
        told = [line for line in lines if "now requires_grad=True: 1.weight and 1.bias" in line]
        assert any("rank 1 on" in line for line in told), lines
        words = re.compile(r"plan '|consistency|bucket\.|DistributedOptimizer\.|batches")
        assert not words.search("\n".join([text, *lines])), (text, lines)


def posted_before():
    """Rank 0 has called rank 1's operation before it waits in its own: no circle."""
    hvd.init()
    if hvd.rank() == 0:
        hvd.allreduce_async(torch.ones(3), name="b")
        hvd.allreduce(torch.ones(3), name="a")
    else:
        time.sleep(1.0)
        hvd.allreduce(torch.ones(3), name="b")
        time.sleep(1.0)
        hvd.allreduce(torch.ones(3), name="a")


@pytest.mark.ranks(2, 3)
def test_ranks_that_only_are_late_are_in_no_circle(world):
    world.run(posted_before, knobs=WARNS)
