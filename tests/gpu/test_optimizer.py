"""DistributedOptimizer on parameters that are on a GPU: its buckets are transfers of the queue."""

import contextlib

import pytest
import torch

import hvdlite as hvd
from tests.gpu.stand_in import HostDevices, count_launches, count_starts, new_queue, on_gpu
from tests.gpu.test_ends import Raising

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.hosts("2,1")]

routes = pytest.mark.parametrize("route", ["group", "staged"])


def model_of(to):
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
    )
    for module in model:
        for name, param in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(to(param.detach().double())))
    return model


def train(to, steps=6, skip=None, weights=None, after_step=None, **options):
    """The losses and the parameters at the end. skip: a layer that only rank 0 uses. weights: by
    rank. after_step: called after each."""
    model = model_of(to)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        samples = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        hidden = model[1](model[0](samples))
        if skip is None or hvd.rank() == 0:
            hidden = model[2](hidden)
        loss = (model[3](hidden) - samples.sum(dim=1, keepdim=True)).square().mean()
        if weights is not None:
            optimizer.set_weight(weights[hvd.rank()])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step()
    return losses, [param.detach().clone() for param in model.parameters()]


OPTIONS = {
    "as it is": {},
    "one bucket": {"num_groups": 1},
    "predivided": {"gradient_predivide_factor": 2.0},
    "a sum": {"op": hvd.Sum, "backward_passes_per_step": 1},
    "a layer that only rank 0 uses": {"skip": 2},
    "weights": {"weights": (3, 0, 5)},
    "Adasum": {"op": hvd.Adasum},
    "16 bit": {"compression": hvd.Compression.bf16},
}


def compare(route, option):
    queue = new_queue(route)
    starts, launches = count_starts(queue), count_launches()
    expected, params = train(lambda tensor: tensor, **OPTIONS[option])
    assert not starts
    # (Then the optimizer's communicator is there.)
    losses, on_device = train(on_gpu, after_step=queue.settle, **OPTIONS[option])
    exact = {} if option != "16 bit" else {"rtol": 0.05, "atol": 0.01}
    problems = []
    if not torch.allclose(torch.tensor(losses), torch.tensor(expected), **exact):
        problems.append((losses, expected))
    problems += [
        (index, (a - b).abs().max().item())
        for index, (a, b) in enumerate(zip(on_device, params, strict=True))
        if not torch.allclose(torch.Tensor(a), b, **exact)
    ]
    # The same on every rank, bitwise.
    flat = torch.cat([torch.Tensor(param).reshape(-1) for param in on_device])
    everyones = hvd.allgather(flat[None], name="compare")
    problems += [] if torch.equal(everyones, everyones[:1].expand_as(everyones)) else ["differ"]
    assert not problems, problems
    return len(starts), len(launches), sorted({start.name for start in starts})


@routes
@pytest.mark.parametrize("option", OPTIONS)
def test_training_gives_what_it_gives_in_host_memory(world, route, option):
    knobs = {"HVDLITE_FIRST_BUCKET_BYTES": "100", "HVDLITE_BUCKET_BYTES": "500"}
    every = world.run(compare, route, option, knobs=knobs)
    starts, launches, names = every[0]
    assert every == [(starts, launches, names)] * world.size
    if option != "Adasum":
        # The first step's go through the queue, which forms the group.
        agreed = 1 if route == "group" else 6
        assert (starts, launches) == (agreed * len(names), (6 - agreed) * len(names))
        assert len(names) > 1 or option == "one bucket"
        assert all(".bucket." in name for name in names)


def look_at_the_gradients():
    """Reduced when backward returns, and in the bucket's memory."""
    new_queue()
    model = model_of(on_gpu)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Sum)
    model(torch.full((1, 6), float(hvd.rank()), dtype=torch.float64)).sum().backward()
    got = model[0].weight.grad.clone()
    alone = model_of(lambda tensor: tensor)
    expected = torch.zeros_like(got)
    for rank in range(hvd.size()):
        alone.zero_grad()
        alone(torch.full((1, 6), float(rank), dtype=torch.float64)).sum().backward()
        expected += alone[0].weight.grad
    assert torch.allclose(torch.Tensor(got), torch.Tensor(expected))
    optimizer.step()
    optimizer.zero_grad()


def test_gradients_are_reduced_when_backward_returns(world):
    world.run(look_at_the_gradients)


def change_the_world():
    """A queue ends with its world; the optimizer goes on in the next one."""
    new_queue()
    model = model_of(on_gpu)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        new_queue()


def test_an_optimizer_outlives_its_world(world):
    world.run(change_the_world)


def mix_in_one_model():
    """Some parameters here, some there."""
    queue = new_queue()
    starts = count_starts(queue)
    model = model_of(lambda tensor: tensor)
    last = model[3]
    for name, param in list(last.named_parameters()):
        setattr(last, name, torch.nn.Parameter(on_gpu(param.detach())))
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Sum)
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    alone = model_of(lambda tensor: tensor)
    alone(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    wrong = [
        i
        for i, (a, b) in enumerate(pairs)
        if not torch.allclose(torch.Tensor(a.grad), hvd.size() * b.grad)
    ]
    optimizer.step()
    assert not wrong
    assert len(starts) == 1


def test_parameters_here_and_there_in_one_model(world):
    world.run(mix_in_one_model)


def one_backward_more(route):
    new_queue(route)
    param = torch.nn.Parameter(on_gpu(torch.zeros(3)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))

    def train():
        for step in range(4):
            for _ in range(2 if step == 1 and hvd.rank() == 1 else 1):
                optimizer.zero_grad()
                param.sum().backward()
            optimizer.step()

    with pytest.raises(hvd.HorovodInternalError, match="gradients of different") as caught:
        train()
    # After it all ranks count alike.
    for _ in range(2):
        optimizer.zero_grad()
        param.sum().backward()
    return str(caught.value)


@pytest.mark.wide_in("2,1")
@routes
def test_ranks_that_run_different_numbers_of_backwards_are_told_so(world, route):
    for failure in world.run(one_backward_more, route):
        assert "backward 2 of step 2 on rank 1" in failure


def rounds_with_joined_ranks(route):
    """Rank r has r + 4 batches; twice, with all ranks there in between."""
    queue = new_queue(route)
    starts, launches = count_starts(queue), count_launches()
    param = torch.nn.Parameter(on_gpu(torch.zeros(3)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    rank, size = hvd.rank(), hvd.size()
    found = []
    for _ in range(2):
        for batch in range(rank + 4):
            optimizer.zero_grad()
            (param * (rank + 1.0)).sum().backward()
            present = [member for member in range(size) if member + 4 > batch]
            found.append((param.grad[0].item(), sum(m + 1 for m in present) / size))
            optimizer.step()
            queue.settle()
        assert hvd.join() == size - 1
    assert all(abs(got - expected) < 1e-6 for got, expected in found), found
    return len(starts), len(launches)


@routes
def test_gradients_are_reduced_while_ranks_have_joined(world, route):
    every = world.run(rounds_with_joined_ranks, route)
    for rank, (starts, launches) in enumerate(every):
        # Launched at once while all are there, but for the first step, which forms the group.
        at_once = 2 * 4 - 1 if route == "group" else 0
        assert (starts, launches) == (2 * (rank + 4) - at_once, at_once)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no paper")


def one_backward_raises(route):
    queue = new_queue(route)
    model = model_of(on_gpu)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    samples = torch.ones(2, 6, dtype=torch.float64)
    caught = []
    for step in range(5):
        queue.settle()
        before = [torch.Tensor(param.detach()).clone() for param in model.parameters()]
        optimizer.zero_grad()
        hidden = model[1](model[0](samples))
        if step == 3 and hvd.rank() == 1:
            hidden = Raises.apply(hidden)
        try:
            model[3](model[2](hidden)).sum().backward()
            optimizer.step()
        except RuntimeError as error:
            caught.append(str(error))
            optimizer.zero_grad()
            after = model.parameters()
            assert all(
                torch.equal(torch.Tensor(param.detach()), old)
                for param, old in zip(after, before, strict=True)
            )
    return caught


@pytest.mark.ranks(2)
@pytest.mark.hosts
@routes
def test_a_backward_that_raises_gives_up_the_round_on_all_ranks(world, route):
    knobs = {"HVDLITE_FIRST_BUCKET_BYTES": "100", "HVDLITE_BUCKET_BYTES": "500"}
    other, raising = world.run(one_backward_raises, route, knobs=knobs)
    assert raising == ["no paper"]
    [text] = other
    assert "backward() has raised an exception on some ranks" in text


def two_optimizers_in_one_backward():
    """Each rank's backward reaches them in another order."""
    queue = new_queue()
    launches = count_launches()
    first, second = ([torch.nn.Parameter(on_gpu(torch.ones(4))) for _ in range(4)] for _ in "ab")
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
        for params in (first, second)
    ]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = [*first, *second] if hvd.rank() else [*second, *first]
        value = on_gpu(torch.zeros(4))
        for param in order:
            value = (value + param * (step + 1.0)) * 1.0
        value.sum().backward()
        grads = [param.grad.tolist() for param in (*first, *second)]
        assert grads == [[hvd.size() * (step + 1.0)] * 4] * 8, (step, grads)
        for optimizer in optimizers:
            optimizer.step()
        queue.settle()
    for optimizer in optimizers:  # alone, each launches at once
        optimizer.zero_grad()
    before = len(launches)
    sum(param.sum() for param in second).backward()
    return len(launches) - before


@pytest.mark.ranks(2)
@pytest.mark.hosts
def test_two_optimizers_of_one_backward_launch_in_one_order(world):
    knobs = {"HVDLITE_FIRST_BUCKET_BYTES": "16", "HVDLITE_BUCKET_BYTES": "16"}
    assert world.run(two_optimizers_in_one_backward, knobs=knobs) == [4, 4]


class FailsLater(HostDevices):
    """Of the second group, that of the optimizer, a launch fails on rank 1."""

    made = 0

    def group(self, store, rank, size, device):
        group = super().group(store, rank, size, device)
        self.made += 1
        return Raising(group, 4) if rank == 1 and self.made == 2 else group


def one_launch_fails():
    queue = new_queue("group", FailsLater())
    params = [torch.nn.Parameter(on_gpu(torch.ones(4))) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), op=hvd.Sum)
    errors = []
    for _ in range(4):
        try:
            sum((param * (hvd.rank() + 1.0)).sum() for param in params).backward()
            assert params[0].grad.tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 4
        except hvd.HorovodInternalError as error:
            errors.append(str(error))
        optimizer.zero_grad()
        queue.settle()
    return errors


@pytest.mark.ranks(2)
@pytest.mark.hosts
def test_a_launch_that_fails_on_one_rank_fails_the_round_on_all(world):
    knobs = {"HVDLITE_FIRST_BUCKET_BYTES": "16", "HVDLITE_BUCKET_BYTES": "16"}
    [[other], [failing]] = world.run(one_launch_fails, knobs=knobs)
    assert "failed on rank 1: RuntimeError: out of paper" in failing
    assert "as a launch has failed on rank 1" in other


def a_captured_backward_before_there_is_a_communicator():
    devices = HostDevices()
    queue = new_queue("group", devices)
    param = torch.nn.Parameter(on_gpu(torch.ones(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.0), op=hvd.Sum, check_start=False
    )
    devices.capturing = True
    with pytest.raises(RuntimeError, match="run a few steps before the capture"):
        param.sum().backward()
    devices.capturing = False
    with contextlib.suppress(hvd.HorovodInternalError):
        optimizer.zero_grad()
    for _ in range(3):
        param.sum().backward()
        assert param.grad.tolist() == [hvd.size()] * 4
        optimizer.zero_grad()
        queue.settle()
    devices.capturing = True
    param.sum().backward()
    assert param.grad.tolist() == [hvd.size()] * 4


@pytest.mark.ranks(2)
@pytest.mark.hosts
def test_a_backward_is_captured_in_a_graph_once_there_is_a_communicator(world):
    world.run(a_captured_backward_before_there_is_a_communicator)
