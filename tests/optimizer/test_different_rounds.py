"""Ranks that run different numbers of backwards get an error, all of them; others get none."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.checks.position_exchange import difference

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.mpis("mpich")]

STEPS = 6
ERROR = "gradients of different backward passes"


def parameters(dtype):
    return [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2)]


def loss_of(params, sparse):
    if not sparse:
        return sum(param.sum() for param in params)
    rows = torch.arange(2)
    return sum(nn.functional.embedding(rows, p[:, None], sparse=True).sum() for p in params)


def distributed(params, kind=torch.optim.SGD, **options):
    return hvd.DistributedOptimizer(kind(params, lr=0.125), **options)


KINDS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "complex64": (torch.complex64, {}),
    "fp16 compression": (torch.float32, {"compression": hvd.Compression.fp16}),
    "a sum": (torch.float32, {"op": hvd.Sum}),
    "predivided": (torch.bfloat16, {"gradient_predivide_factor": 3.0}),
}


def one_backward_more(kind, who, at):
    """Rank `who` runs a backward more in step `at`, which is no training step."""
    hvd.init()
    dtype, options = KINDS[kind]
    params = parameters(dtype)
    optimizer = distributed(params, **options)
    failure = None
    steps = 0
    try:
        for step in range(STEPS):
            if hvd.rank() == who and step == at:
                loss_of(params, False).real.backward()
                optimizer.zero_grad()
            loss_of(params, False).real.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    except hvd.HorovodInternalError as error:
        failure = str(error)
    # It works again, and all ranks begin to count from the same number.
    hvd.broadcast_parameters(params, root_rank=0)
    optimizer.zero_grad()
    for _ in range(5):
        loss_of(params, False).real.backward()
        optimizer.step()
        optimizer.zero_grad()
    everyones = hvd.allgather(
        torch.view_as_real(params[0])[None] if dtype.is_complex else params[0][None]
    )
    assert (everyones == everyones[0]).all()
    return steps, failure


@pytest.mark.wide_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("who", "at"), [(1, 0), pytest.param(0, 3, marks=pytest.mark.wide)])
def test_a_backward_that_one_rank_runs_alone_is_an_error_on_all_in_the_next_round(
    world, kind, who, at
):
    results = world.run(one_backward_more, kind, who, at)
    others = [rank for rank in range(world.size) if rank != who]
    named = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    for rank, (steps, failure) in enumerate(results):
        assert steps == (at if rank == who else at + 1)
        assert failure == results[0][1]
        assert f"backward 2 of step {at + 1} on rank {who}" in failure
        assert f"backward 1 of step {at + 2} on {named}" in failure
        assert "optimizer.no_sync()" in failure
        assert "hvd.join()" in failure


def only_rows(who):
    hvd.init()
    table = nn.Parameter(torch.zeros(4, 2))
    optimizer = distributed([table], torch.optim.SparseAdam)
    rows = torch.tensor([hvd.rank()])
    for step in range(3):
        for _ in range(2 if hvd.rank() == who and step == 1 else 1):
            optimizer.zero_grad()
            nn.functional.embedding(rows, table, sparse=True).sum().backward()
        optimizer.step()


def sparse_rounds():
    hvd.init()
    only_rows(-1)
    with pytest.raises(hvd.HorovodInternalError, match=ERROR) as caught:
        only_rows(1)
    return str(caught.value)


def test_rounds_that_only_gather_rows_are_counted_too(world):
    for failure in world.run(sparse_rounds):
        assert "backward 2 of step 2 on rank 1" in failure


def in_a_set():
    hvd.init()
    pair = hvd.add_process_set([hvd.size() - 2, hvd.size() - 1])
    if not pair.included():
        return None
    params = parameters(torch.float32)
    optimizer = distributed(params, process_set=pair)

    def train():
        for _ in range(3):
            loss_of(params, False).backward()
            optimizer.step()
            optimizer.zero_grad()
            if hvd.rank() == hvd.size() - 1:
                loss_of(params, False).backward()
                optimizer.zero_grad()

    with pytest.raises(hvd.HorovodInternalError, match=ERROR) as caught:
        train()
    return str(caught.value)


@pytest.mark.ranks(3)
def test_the_error_names_the_ranks_of_a_process_set_by_their_numbers_in_the_world(world):
    for failure in world.run(in_a_set):
        last = world.size - 1
        assert failure is None or f"of step 2 on rank {last}" in failure


def one_batch_more():
    hvd.init()
    params = parameters(torch.float32)
    optimizer = distributed(params)
    try:
        for _ in range(4 if hvd.rank() == 0 else 3):
            loss_of(params, False).backward()
            optimizer.step()
            optimizer.zero_grad()
    except hvd.HorovodInternalError as error:
        return str(error)
    finally:
        # As at the end of the program.
        hvd.shutdown()
    return None


def test_the_error_of_a_rank_that_waits_for_one_whose_batches_have_ended_names_join(world):
    waiting, *ended = world.run(one_batch_more)
    assert ended == [None] * (world.size - 1)
    assert "has left" in waiting
    assert "hvd.join()" in waiting


def legitimate():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    params, others = parameters(torch.float32), parameters(torch.float32)
    optimizer = distributed(params)
    second = distributed(others)

    def step(*, zero=True):
        loss_of(params, False).backward()
        optimizer.step()
        if zero:
            optimizer.zero_grad()

    for _ in range(5):
        step()
    # Not communicating, also on one rank alone, whose gradients are not kept.
    if rank == 0:
        with optimizer.no_sync():
            loss_of(params, False).backward()
        for param in params:
            param.grad = None
    step()
    # Two rounds and more in a step.
    for rounds in range(6):
        for _ in range(rounds):
            loss_of(params, False).backward()
            optimizer.zero_grad()
        step()
    # One that reaches nothing on a rank.
    unrelated = torch.zeros(3, requires_grad=True)
    for _ in range(2):
        (loss_of(params, False) if rank else unrelated.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    # zero_grad as often as anyone likes; a step without a backward, a step that is not made.
    for _ in range(rank):
        optimizer.zero_grad()
    step(zero=False)
    optimizer.zero_grad()
    loss_of(params, False).backward()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    # Several in one backward, one of which makes more steps than the other.
    for turn in range(4):
        (loss_of(params, False) + loss_of(others, False)).backward()
        optimizer.step()
        if turn % 2:
            second.step()
        for one in (optimizer, second):
            one.zero_grad()
    optimizer.set_backward_passes_per_step(3)
    for _ in range(6):
        loss_of(params, False).backward()
        if params[0].grad is not None and optimizer._hvdlite_reducer.step.communicated:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    # A closure, which runs twice in a step.
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(params, False)
        loss.backward()
        calls.append(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    # Batches that end earlier, twice.
    for _ in range(2):
        for _ in range(1 + rank):
            step()
        assert hvd.join() == size - 1
    hvd.broadcast_parameters(params, root_rank=size - 1)
    step()
    # An optimizer made later, and another over the same parameters.
    third = distributed(params)
    loss_of(params, False).backward()
    third.step()
    everyones = hvd.allgather(params[0][None])
    assert (everyones == everyones[0]).all()


@pytest.mark.hosts("1,1")
def test_ranks_that_run_as_many_backwards_as_the_others_get_no_error(world):
    world.run(legitimate)


def scaled():
    hvd.init()
    params = parameters(torch.float32)
    optimizer = distributed(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        factor = float("inf") if step % 3 == 1 and hvd.rank() == 0 else 1.0
        scaler.scale(loss_of(params, False) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return params[0].tolist()


def test_steps_that_grad_scaler_skips_are_counted_alike(world):
    results = world.run(scaled)
    assert results == [[-0.125 * 4] * 3] * world.size


def local_steps():
    """Each rank makes a number of steps of its own, after which the parameters are averaged."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    params = parameters(torch.float32)
    optimizer = distributed(params, check_start=False)
    for turn in range(3):
        for _ in range(1 + 2 * rank):
            with optimizer.no_sync():
                loss_of(params, False).backward()
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        for param in params:
            hvd.allreduce_(param.data)
        # One together, in the middle of which a rank begins a step and drops it.
        loss_of(params, False).backward()
        if rank == turn % size:
            optimizer.zero_grad()
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        loss_of(params, False).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Of 0.125 each: as many as the mean of the ranks, and the one together.
    return params[0].tolist(), 3 * 0.125 * (size + 1)


def test_steps_that_a_rank_makes_without_the_others_do_not_count(world):
    for found, moved in world.run(local_steps):
        assert found == [-moved] * 3


def test_the_error_says_that_a_join_has_begun_the_count_anew():
    since = "backward 1 of step 2 on rank 0, backward 2 of step 2 on rank 1"
    joined, not_joined = (
        difference([(2, 0, 0, 0), (2, 1, 0, 0)], (0, 1), joins) for joins in (1, 0)
    )
    assert joined is not None
    assert not_joined is not None
    assert f"{since} (counted since the last hvd.join()). Every" in joined
    assert f"{since}. Every" in not_joined
