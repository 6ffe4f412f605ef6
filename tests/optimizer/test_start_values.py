"""Ranks that start from different parameters get one warning, before the first step."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.checks.fingerprints import bytes_of, digest, fingerprint, row_sums
from tests.optimizer.models import model

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def starts(how, op, options):
    """The last rank's third and fifth parameter differ. What each rank is told, in three steps."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=op, **options
    )
    if rank == size - 1 and how != "alike":
        # In one bit each, and after the optimizer has been made.
        with torch.no_grad():
            net[2].weight.view(torch.int64)[1, 2] ^= 1
            net[4].weight.neg_()
    if how == "broadcast":
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    texts = []
    before = [p.detach().clone() for p in net.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                net(torch.full((1, 6), rank + 1.0, dtype=torch.float64)).sum().backward()
                optimizer.step()
            except hvd.HorovodInternalError as error:
                texts.append((step, "error", str(error)))
                assert all(map(torch.equal, before, net.parameters())), "no step was made"
        texts += [(step, "warning", str(each.message)) for each in caught]
    return texts


def is_told(text, size):
    """The first parameter that differs, and the ranks."""
    assert text.startswith(
        "DistributedOptimizer: the ranks start from different values: parameter '2.weight' is not "
        "the same on all ranks: "
    )
    who = "no majority, between rank 0; rank 1" if size == 2 else "rank 2 differs from ranks 0, 1"
    assert who in text
    assert "(2 of " in text
    assert "call broadcast_parameters(model.state_dict(), root_rank=0)" in text
    return True


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_different_values_are_one_warning_that_names_the_first_parameter(world, op):
    first, *others = world.run(starts, "different", op, {})
    ((step, kind, text),) = first
    assert (step, kind) == (0, "warning")
    assert is_told(text, world.size)
    assert others == [[]] * (world.size - 1)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_different_values_are_an_error_on_every_rank_where_strict(world, op):
    told = world.run(starts, "different", op, {}, knobs={"HVDLITE_STRICT": "1"})
    ((step, kind, text),) = told[0]
    assert (step, kind) == (0, "error")
    assert is_told(text, world.size)
    assert told == [told[0]] * world.size


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize(
    ("how", "options"),
    [("alike", {}), ("broadcast", {}), ("different", {"check_start": False})],
)
def test_nothing_is_said_of_values_that_are_alike_or_not_compared(world, how, options, op):
    assert world.run(starts, how, op, options) == [[]] * world.size


def another_order(how, op):
    """The last rank's optimizer has its parameters the other way around."""
    hvd.init()
    params = {
        name: nn.Parameter(torch.full((2,), value)) for name, value in (("a", 1.0), ("b", 2.0))
    }
    items = list(params.items())[:: -1 if hvd.rank() == hvd.size() - 1 else 1]
    named = items if how == "torch's names" else [param for _, param in items]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(named, lr=0.1), op=op)
    loss = (params["a"] * params["b"]).sum()
    with pytest.raises(hvd.HorovodInternalError) as caught:  # noqa: PT012
        loss.backward()
        optimizer.step()  # with Adasum here
    assert [p[0].item() for p in params.values()] == [1.0, 2.0], "no step was made"
    return str(caught.value)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "torch's names",
            "parameter 0 differs: 'a' float32[2] on rank 0, 'b' float32[2] on rank 1",
        ),
        ("no names", "All ranks have the same values, in another order; on every rank make the"),
    ],
)
def test_parameters_in_another_order_are_an_error_on_every_rank(world, how, words, op):
    (text,) = set(world.run(another_order, how, op))
    assert words in text


def other_optimizer(what):
    """The last rank's optimizer has another state, or other options."""
    hvd.init()
    net = model()
    differs = hvd.rank() == hvd.size() - 1
    inner = torch.optim.SGD(
        net.parameters(), lr=0.2 if differs and what == "lr" else 0.1, momentum=0.5
    )
    state = {"momentum_buffer": torch.ones_like(net[2].weight)}
    if what == "state of one" and differs:
        inner.state[net[2].weight] = state
    if what == "other state":
        state["momentum_buffer"][0, 0] += differs
        inner.state[net[2].weight] = state
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(3):
                net(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except hvd.HorovodInternalError as error:
            return [str(error)]
    return [str(each.message) for each in caught]


STATE = "momentum_buffer of 2.weight"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lr", "option 'lr of parameter group 0' is not the same on all ranks"),
        ("other state", f"state '{STATE}' is not the same on all ranks"),
        ("state of one", f"state '{STATE}' float64[16, 16] is there on rank 1, but not on rank 0"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_other_state_or_options_at_the_start_are_told_like_other_values(world, what, words, strict):
    told = world.run(other_optimizer, what, knobs={"HVDLITE_STRICT": str(int(strict))})
    assert [len(each) for each in told] == [1, int(strict)]
    for text in itertools.chain(*told):
        assert text.startswith("DistributedOptimizer: the ranks start from different values: ")
        assert words in text
        assert "broadcast_optimizer_state(optimizer, root_rank=0) on every rank" in text


@pytest.mark.parametrize("what", ["lr", "other state"])
def test_the_periodic_check_names_what_differed_at_the_start_and_not_the_parameters(world, what):
    (text,) = {each[-1] for each in world.run(other_optimizer, what, knobs=PERIODIC)}
    assert ("'lr of parameter group 0'" if what == "lr" else f"'{STATE}'") in text
    assert "without broadcast_optimizer_state" in text


PERIODIC = {"HVDLITE_CHECK_PARAMETERS": "1"}


def only_here():
    hvd.init()
    p = nn.Parameter(torch.full((1,), float(hvd.rank())))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), check_start=hvd.rank() > 0)
    p.sum().backward()
    optimizer.step()
    assert p.item() == hvd.rank() - 1


def test_values_are_compared_where_all_ranks_want_it(world):
    world.run(only_here)


def on_the_host(tensor):
    return fingerprint(bytes_of(tensor))


def on_a_device(tensor):
    return digest(row_sums(bytes_of(tensor)).tolist())


HASHES = [on_the_host, on_a_device]


@pytest.mark.parametrize("hash_of", HASHES)
@pytest.mark.parametrize("count", [1, 7, (1 << 16) + 3, (1 << 22) + 5])
def test_a_hash_depends_on_every_bit_and_place(hash_of, count):
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator)
    others = [-values, torch.zeros(count), -torch.zeros(count)]
    for place in {0, count // 2, count - 1}:
        changed = values.clone()
        changed.view(torch.int32)[place] ^= 1
        others.append(changed)
    if count > 1:
        swapped = values.clone()
        swapped[[0, -1]] = values[[-1, 0]]
        others += [swapped, values.flip(0).neg()]
    assert len({hash_of(each) for each in (values, *others)}) == len(others) + 1
    assert hash_of(values) == hash_of(values.clone())


@pytest.mark.parametrize("hash_of", HASHES)
def test_there_is_a_hash_of_every_dtype_and_shape(hash_of):
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool):
        for shape in ((), (3,), (2, 3), (2, 0)):
            ones = torch.ones(shape, dtype=dtype)
            assert hash_of(ones) == hash_of(ones.clone())
            assert hash_of(ones) != hash_of(torch.zeros_like(ones)) or not ones.numel()


def test_the_hash_is_of_the_values_and_not_of_how_they_lie():
    hash_of = on_the_host
    values = torch.randn(3, 5)
    assert hash_of(values.t().contiguous().t()) == hash_of(values)
    numbers = torch.randn(4, dtype=torch.complex64)
    assert hash_of(numbers.conj()) == hash_of(numbers.conj().resolve_conj()) != hash_of(numbers)
    nan = torch.tensor([torch.nan])
    assert hash_of(nan) == hash_of(nan.clone())


def test_what_has_no_values_to_read_is_left_out():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(4)
    unreadable = [torch.ones(4, device="meta"), torch.ones(4, 4).to_sparse(), freed, fake]
    assert [bytes_of(each) for each in unreadable] == [None] * 4
