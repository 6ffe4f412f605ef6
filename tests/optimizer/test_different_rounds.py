"""Ranks that run different numbers of backwards get an error, all of them; others get none."""

import functools

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.checks.position_exchange import difference
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import same_on_all_ranks, sgd

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.mpis("mpich")]


def parameters(dtype=torch.float32):
    return [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2)]


def backward(*params):
    sum(param.sum() for param in params).real.backward()


def step(optimizer, *params):
    backward(*params)
    optimizer.step()
    optimizer.zero_grad()


def one_runs_alone(who, optimizer, params):
    """The error on all ranks, if `who` runs a backward that is no training step."""
    if hvd.rank() == who:
        backward(*params)
        optimizer.zero_grad()
    else:
        step(optimizer, *params)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        backward(*params)
    return str(caught.value)


KINDS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "complex64": (torch.complex64, {}),
    "fp16 compression": (torch.float32, {"compression": hvd.Compression.fp16}),
    "a sum": (torch.float32, {"op": hvd.Sum}),
    "predivided": (torch.bfloat16, {"gradient_predivide_factor": 3.0}),
}


@pytest.mark.wide_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("who", "at"), [(1, 0), pytest.param(0, 3, marks=pytest.mark.wide)])
@on_ranks()
def test_a_backward_that_one_rank_runs_alone_is_an_error_on_all_in_the_next_round(kind, who, at):
    dtype, options = KINDS[kind]
    params = parameters(dtype)
    optimizer = sgd(params, **options)

    for _ in range(at):
        step(optimizer, *params)
    text = same_on_all_ranks(one_runs_alone(who, optimizer, params))
    assert f"backward 2 of step {at + 1} on rank {who}" in text
    others = [str(rank) for rank in range(hvd.size()) if rank != who]
    named = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
    assert f"backward 1 of step {at + 2} on {named}" in text
    assert "optimizer.no_sync()" in text
    assert "hvd.join()" in text
    # It works again, and all ranks begin to count from the same number.
    hvd.broadcast_parameters(params, root_rank=0)
    optimizer.zero_grad()
    for _ in range(5):
        step(optimizer, *params)
    same_on_all_ranks(params[0].tolist())


@on_ranks()
def test_rounds_that_only_gather_rows_are_counted_too():
    table = nn.Parameter(torch.zeros(4, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([table]))
    rows = torch.tensor([hvd.rank()])
    with pytest.raises(hvd.HorovodInternalError, match="backward 2 of step 2 on rank 1"):  # noqa: PT012
        for step in range(3):
            for _ in range(2 if hvd.rank() == step == 1 else 1):
                optimizer.zero_grad()
                nn.functional.embedding(rows, table, sparse=True).sum().backward()
            optimizer.step()


@on_ranks(3)
def test_the_error_names_the_ranks_of_a_process_set_by_their_numbers_in_the_world():
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        params = parameters()
        optimizer = sgd(params, process_set=pair)
        step(optimizer, *params)
        assert "of step 2 on rank 2" in one_runs_alone(2, optimizer, params)


@on_ranks()
def test_the_error_of_a_rank_that_waits_for_one_whose_batches_have_ended_names_join():
    params = parameters()
    optimizer = sgd(params)
    for _ in range(3):
        step(optimizer, *params)
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"(?s)has left.*hvd\.join\(\)"):
            step(optimizer, *params)
    # As at the end of the program.
    hvd.shutdown()


@on_ranks(2, 3, hosts=("1,1",))
def test_ranks_that_run_as_many_backwards_as_the_others_get_no_error():
    params, others = parameters(), parameters()
    optimizer, second = sgd(params), sgd(others)
    train = functools.partial(step, optimizer, *params)

    for _ in range(5):
        train()
    # Not communicating, also on one rank alone, whose gradients are not kept.
    if hvd.rank() == 0:
        with optimizer.no_sync():
            backward(*params)
        for param in params:
            param.grad = None
    train()
    # Two rounds and more in a step.
    for rounds in range(6):
        for _ in range(rounds):
            backward(*params)
            optimizer.zero_grad()
        train()
    # zero_grad as often as anyone likes; a step without a backward, a step that is not made.
    for _ in range(hvd.rank()):
        optimizer.zero_grad()
    train()
    backward(*params)
    optimizer.zero_grad()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    train()
    # Several in one backward, one of which makes more steps than the other.
    for turn in range(4):
        backward(*params, *others)
        optimizer.step()
        if turn % 2:
            second.step()
        for one in (optimizer, second):
            one.zero_grad()
    # An optimizer made later, and another over the same parameters.
    step(sgd(params), *params)
    same_on_all_ranks(params[0].tolist())


@on_ranks()
def test_steps_that_a_rank_makes_without_the_others_do_not_count():
    """Each rank makes a number of steps of its own, after which the parameters are averaged."""
    rank, size = hvd.rank(), hvd.size()
    params = parameters()
    optimizer = sgd(params, lr=0.125, check_start=False)
    for turn in range(3):
        for _ in range(1 + 2 * rank):
            with optimizer.no_sync():
                backward(*params)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        for param in params:
            hvd.allreduce_(param.data)
        # One together, in the middle of which a rank begins a step and drops it.
        backward(*params)
        if rank == turn % size:
            optimizer.zero_grad()
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        step(optimizer, *params)
    # Of 0.125 each: as many as the mean of the ranks, and the one together.
    assert params[0].tolist() == [-3 * 0.125 * (size + 1)] * 3


def test_the_error_says_that_a_join_has_begun_the_count_anew():
    since = "backward 1 of step 2 on rank 0, backward 2 of step 2 on rank 1"
    for joins, words in ((1, " (counted since the last hvd.join())"), (0, "")):
        text = difference([(2, 0, 0, 0), (2, 1, 0, 0)], (0, 1), joins)
        assert text is not None
        assert f"{since}{words}. Every" in text
