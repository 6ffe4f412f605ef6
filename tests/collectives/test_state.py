"""State that all ranks should have alike."""

import collections

import pytest
import torch
from torch import nn

import hvdlite as hvd

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.mpis("mpich")]


def every_dtype(rank):
    return {
        "float": torch.full((3,), rank + 0.5),
        "long": torch.tensor([rank, rank + 1]),
        "bool": torch.tensor([rank % 2 == 0] * 5),
        "half": torch.full((2, 2), float(rank), dtype=torch.float16),
        "complex": torch.full((3,), rank + 1j, dtype=torch.complex64),
        "uint16": torch.full((3,), rank, dtype=torch.uint16),
        "float8": torch.full((5,), rank + 1.0).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(float(rank)),
        "empty": torch.empty(0, 4),
        "transposed": torch.full((3, 4), float(rank)).add(torch.arange(4)).t(),
        "conjugated": torch.tensor([rank + 1j, 2j], dtype=torch.complex64).conj(),
        "negated": torch.tensor([1 + (rank + 1) * 1j, 2j], dtype=torch.complex64).conj().imag,
        "expanded": torch.tensor([[rank], [rank + 1]]).expand(2, 3),
        "parameter": nn.Parameter(torch.full((2,), float(rank))),
        "none": None,
    }


def raw(tensor):
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .tolist()
    )


def broadcasts(form):
    hvd.init()
    for root in range(hvd.size()):
        mine = every_dtype(hvd.rank())
        if form == "dict":
            # Filled in another order on another rank.
            items = list(mine.items())
            hvd.broadcast_parameters(dict(items if hvd.rank() % 2 else items[::-1]), root)
        elif form == "list":
            hvd.broadcast_parameters(list(mine.items()), root_rank=root)
        elif form == "iterator":
            hvd.broadcast_parameters(iter(mine.items()), root)
        else:
            hvd.broadcast_parameters([t for t in mine.values() if t is not None], root)
        for name, tensor in every_dtype(root).items():
            if tensor is not None:
                assert raw(mine[name]) == raw(tensor), name
                assert mine[name].stride() == tensor.stride()


@pytest.mark.parametrize("form", ["dict", "list", "iterator", "tensors"])
def test_parameters_of_any_dtype_and_strides_become_the_roots(world, form):
    world.run(broadcasts, form)


def refuses():
    hvd.init()
    for params, text in (
        ({"a": 3}, "'a' is int, expected a tensor"),
        (torch.ones(2), "got Tensor"),
        (17, "got int"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.broadcast_parameters(params, 0)
    p = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([p]), 0)
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast_object(1, root_rank=hvd.size())


def test_what_is_no_tensor_is_a_value_error(world):
    world.run(refuses)


def lacks_one():
    hvd.init()
    params = {"a": torch.ones(1), "b": torch.ones(2)}
    if hvd.rank() == hvd.size() - 1:
        del params["a"]
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.broadcast_parameters(params, root_rank=0)
    return str(caught.value)


@pytest.mark.ranks(2, 3)
def test_a_name_that_a_rank_does_not_pass_is_named_on_every_rank(world):
    (text,) = set(world.run(lacks_one))
    assert f"broadcast_parameters: rank {world.size - 1} does not pass 'a', which other" in text


def only_the_root_has_state(make, distributed):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).to(torch.bfloat16))
    optimizer = {
        "Adam": lambda p: torch.optim.Adam(p, lr=0.1 * (rank + 1), amsgrad=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1 * (rank + 1))),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1 * (rank + 1)),
    }[make](net.parameters())
    if rank == root:
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.step()
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_parameters(net.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root, model=net)
    everyones = hvd.allgather_object(optimizer.state_dict())
    for state in everyones:
        torch.testing.assert_close(state, everyones[root], rtol=0, atol=0)
    assert len(everyones[0]["state"]) == 4
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 * size)
    for p in net.parameters():
        # No step was made to get a state.
        assert rank == root or p.grad is None
        for name, value in optimizer.state[p].items():
            assert name == "step" or value.dtype == p.dtype


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("make", ["Adam", "SGD", "AdamW", "Adagrad"])
def test_the_optimizers_state_becomes_the_roots_which_alone_may_have_one(world, make, distributed):
    world.run(only_the_root_has_state, make, distributed)


def in_another_order(how):
    """The last rank's optimizer has its parameters the other way around."""
    hvd.init()
    last = hvd.rank() == hvd.size() - 1
    params = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))}
    if how == "shapes":
        params["b"] = nn.Parameter(torch.zeros(3))
    items = list(params.items())[:: -1 if last else 1]
    if how == "another name" and last:
        items[0] = ("c", items[0][1])
    named = items if how in ("torch's names", "another name") else [param for _, param in items]
    optimizer = torch.optim.SGD(named, lr=1.0, momentum=0.5)
    if how == "the wrapper's names":
        optimizer = hvd.DistributedOptimizer(optimizer, params.items())
    if hvd.rank() == 0:
        inner = torch.optim.SGD([p for _, p in items], lr=1.0, momentum=0.5)
        params["a"].grad, params["b"].grad = (
            torch.full_like(params[n], i) for i, n in enumerate("ab")
        )
        inner.step()
        optimizer.state.update(inner.state)
    try:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    except hvd.HorovodInternalError as error:
        return str(error)
    assert [optimizer.state[p]["momentum_buffer"][0].item() for p in params.values()] == [0, 1]
    assert optimizer.param_groups[0].get("param_names", [n for n, _ in items]) == [
        n for n, _ in items
    ]
    return None


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("torch's names", None),
        ("the wrapper's names", None),
        ("another name", "parameter 1 is 'b' [2] in parameter group 0 on rank"),
        ("shapes", "parameter 0 is without a name [2] in parameter group 0 on rank"),
    ],
)
def test_the_state_of_parameters_in_another_order_goes_by_name_or_is_an_error(world, how, words):
    (text,) = set(world.run(in_another_order, how))
    assert text is None if words is None else words in text


def no_state_at_all():
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([p], lr=0.5 if hvd.rank() == 0 else 0.1)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert not optimizer.state
    assert p.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_without_state_the_options_are_the_roots(world):
    world.run(no_state_at_all)


Pair = collections.namedtuple("Pair", "left right")


class Unusual(torch.optim.Optimizer):
    """Its state has other dtypes than the parameters, and types that load_state_dict wrecks."""

    def __init__(self, params):
        super().__init__(params, {"pair": Pair(1, 2)})

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p] = {
                "master": torch.full_like(p, 1.001, dtype=torch.float32),
                "pair": Pair(torch.ones(1, dtype=torch.float64), "text"),
                "counts": collections.Counter(a=3),
                "parts": [torch.tensor(1.001), (b"bytes", {1, 2})],
            }


def unusual_state(distributed):
    hvd.init()
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Unusual([p])
    if hvd.rank() == 0:
        optimizer.step()
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(optimizer, 0)
    state = optimizer.state[p]
    assert state["master"].dtype == torch.float32
    assert state["master"].eq(torch.tensor(1.001)).all()
    assert state["pair"] == Pair(torch.ones(1), "text")
    assert type(state["pair"]) is Pair
    assert state["pair"].left.dtype == torch.float64
    assert type(state["counts"]) is collections.Counter
    assert (state["counts"]["a"], state["counts"]["none"]) == (3, 0)
    assert state["parts"] == [torch.tensor(1.001), (b"bytes", {1, 2})]
    assert type(optimizer.param_groups[0]["pair"]) is Pair


@pytest.mark.parametrize("distributed", [False, True])
def test_the_state_has_the_roots_dtypes_and_types_also_where_the_parameters_differ(
    world, distributed
):
    world.run(unusual_state, distributed)


class Point:
    def __init__(self, x):
        self.x = x


def objects():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    thing = {"rank": rank, "text": "é" * 1000 * rank, "f": lambda y: y + rank}
    for root in range(size):
        got = hvd.broadcast_object(thing, root_rank=root)
        assert (got["rank"], len(got["text"]), got["f"](1)) == (root, 1000 * root, 1 + root)
        assert (got is thing) == (rank == root)
    assert hvd.broadcast_object(None, name="nothing") is None
    gathered = hvd.allgather_object(Point(rank) if rank else None, name="points")
    assert [point and point.x for point in gathered] == [None, *range(1, size)]
    assert hvd.allgather_object("x" * 100_000 * rank) == ["x" * 100_000 * r for r in range(size)]


def test_any_object_travels(world):
    world.run(objects)
