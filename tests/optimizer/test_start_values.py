"""Ranks that start from different parameters get one warning, before the first step."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import model, same_on_all_ranks, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

STRICT = pytest.mark.parametrize("knobs", [{}, {"HVDLITE_STRICT": "1"}], ids=["", "strict"])
OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])


def told(net, optimizer):
    """What each rank is told in each of three steps: a warning, an error or nothing."""
    texts = []
    before = [p.detach().clone() for p in net.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                net(torch.full((1, 6), hvd.rank() + 1.0, dtype=torch.float64)).sum().backward()
                optimizer.step()
            except hvd.HorovodInternalError as error:
                made = not all(map(torch.equal, before, net.parameters()))
                texts.append((step, "error after a step" if made else "error", str(error)))
        texts += [(step, "warning", str(each.message)) for each in caught]
    return hvd.allgather_object(texts)


def start(how, **options):
    """The last rank's third and fifth parameter differ."""
    net = model()
    optimizer = sgd(net.parameters(), 0.1, net.named_parameters(), **options)
    if hvd.rank() == hvd.size() - 1 and how != "alike":
        # In one bit each, and after the optimizer has been made.
        with torch.no_grad():
            net[2].weight.view(torch.int64)[1, 2] ^= 1
            net[4].weight.neg_()
    if how == "broadcast":
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    return told(net, optimizer)


@OPS
@STRICT
@on_ranks(2, 3)
def test_different_values_are_one_warning_or_an_error_that_names_the_first_parameter(op, knobs):
    size = hvd.size()
    found = start("different", op=op)
    ((step, kind, text),) = found[0]
    assert (step, kind) == (0, "error" if knobs else "warning")
    assert found[1:] == ([found[0]] if knobs else [[]]) * (size - 1)
    who = "no majority, between rank 0; rank 1" if size == 2 else "rank 2 differs from ranks 0, 1"
    assert "the ranks start from different values: parameter '2.weight' is not the same" in text
    assert who in text
    assert "(2 of " in text
    assert "call broadcast_parameters(model.state_dict(), root_rank=0)" in text
    assert "or pass check_start=False" in text


@OPS
@pytest.mark.parametrize(
    ("how", "options"), [("alike", {}), ("broadcast", {}), ("different", {"check_start": False})]
)
@on_ranks()
def test_nothing_is_said_of_values_that_are_alike_or_not_compared(how, options, op):
    assert start(how, op=op, **options) == [[]] * hvd.size()


@OPS
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("torch's names", "0 differs: 'a' float32[2] on rank 0, 'b' float32[2] on rank 1"),
        ("no names", "All ranks have the same values, in another order; on every rank make the"),
    ],
)
@on_ranks()
def test_parameters_in_another_order_are_an_error_on_every_rank(how, words, op):
    """The last rank's optimizer has its parameters the other way around."""
    params = {"a": nn.Parameter(torch.full((2,), 1.0)), "b": nn.Parameter(torch.full((2,), 2.0))}
    items = list(params.items())[:: -1 if hvd.rank() == hvd.size() - 1 else 1]
    optimizer = sgd(items if how == "torch's names" else [param for _, param in items], op=op)
    loss = (params["a"] * params["b"]).sum()
    with pytest.raises(hvd.HorovodInternalError) as caught:  # noqa: PT012
        loss.backward()
        optimizer.step()  # with Adasum here
    assert [p[0].item() for p in params.values()] == [1.0, 2.0], "no step was made"
    assert words in same_on_all_ranks(str(caught.value))


STATE = "momentum_buffer of 2.weight"


def start_of_other_optimizer(what):
    """The last rank's optimizer has another state, or other options."""
    net = model()
    differs = hvd.rank() == hvd.size() - 1
    lr = 0.2 if differs and what == "lr" else 0.1
    inner = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.5)
    state = {"momentum_buffer": torch.ones_like(net[2].weight)}
    if what == "state of one" and differs:
        inner.state[net[2].weight] = state
    if what == "other state":
        state["momentum_buffer"][0, 0] += differs
        inner.state[net[2].weight] = state
    return told(net, hvd.DistributedOptimizer(inner, net.named_parameters()))


@STRICT
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lr", "option 'lr of parameter group 0' is not the same on all ranks"),
        ("other state", f"state '{STATE}' is not the same on all ranks"),
        ("state of one", f"state '{STATE}' float64[16, 16] is there on rank 1, but not on rank 0"),
    ],
)
@on_ranks()
def test_other_state_or_options_at_the_start_are_told_like_other_values(what, words, knobs):
    found = start_of_other_optimizer(what)
    assert [len(each) for each in found] == ([1, 1] if knobs else [1, 0])
    for _, _, text in itertools.chain(*found):
        assert text.startswith("DistributedOptimizer: the ranks start from different values: ")
        assert words in text
        assert "broadcast_optimizer_state(optimizer, root_rank=0) on every rank" in text


@pytest.mark.parametrize(
    ("what", "name"), [("lr", "lr of parameter group 0"), ("other state", STATE)]
)
@on_ranks(knobs={"HVDLITE_CHECK_PARAMETERS": "1"})
def test_the_periodic_check_names_what_differed_at_the_start_and_not_the_parameters(what, name):
    ((_, _, text),) = {tuple(each[-1]) for each in start_of_other_optimizer(what)}
    assert f"'{name}'" in text
    assert "without broadcast_optimizer_state" in text


@on_ranks()
def test_values_are_compared_where_all_ranks_want_it():
    p = nn.Parameter(torch.full((1,), float(hvd.rank())))
    optimizer = sgd([p], check_start=hvd.rank() > 0)
    p.sum().backward()
    optimizer.step()
    assert p.item() == hvd.rank() - 1
