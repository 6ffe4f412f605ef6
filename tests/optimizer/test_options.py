"""The arguments of DistributedOptimizer, and which parameters it takes."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.compression import Compressor
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.world import world as worlds
from tests.core.scaling import differ, reduced
from tests.optimizer.models import (
    assert_same_parameters,
    batches,
    loss_of,
    mean_over_ranks,
    model,
    own,
)

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def scaled(kind):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    options = {
        "sum": {"op": hvd.Sum},
        "predivide": {"gradient_predivide_factor": 4.0},
        "fp16": {"compression": hvd.Compression.fp16},
        "bf16": {"compression": hvd.Compression.bf16},
        "groups": {"groups": 2},
        "num_groups": {"num_groups": 3},
    }[kind]
    net = model(torch.float32)
    lists = [list(net[0].parameters()), [net[4].bias]]
    if kind == "groups":
        options = {"groups": lists, "gradient_predivide_factor": 2.0}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)
    x = torch.ones(2, 6)
    for _ in range(2):
        optimizer.zero_grad()
        (net(x).sum() * (rank + 1)).backward()
        alone = model(torch.float32)
        factor = sum(r + 1 for r in range(size)) / (1 if kind == "sum" else size)
        alone(x).sum().backward()
        tolerance = {"fp16": 2e-3, "bf16": 1e-2}.get(kind, 1e-6)
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad, q.grad * factor, rtol=tolerance, atol=tolerance)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["sum", "predivide", "fp16", "bf16", "groups", "num_groups"])
def test_the_options_change_how_gradients_travel_and_are_combined(world, kind):
    world.run(scaled, kind)


def predivided(dtype):
    """Every parameter is used once, so that this rank's gradient is its own factor."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    factors = [torch.linspace(-1.7, 3.1, 301 * (r + 1))[:301].to(dtype) for r in range(size)]
    dense, table = torch.ones(301, dtype=dtype), torch.ones(301, 1, dtype=dtype)
    params = nn.Parameter(dense), nn.Parameter(table)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=1.0), gradient_predivide_factor=3.7
    )
    for _ in range(2):  # in the second round it is known that the rows need no place
        optimizer.zero_grad()
        rows = nn.functional.embedding(torch.arange(301), params[1], sparse=True)
        loss = params[0] * factors[rank] + rows[:, 0] * factors[rank]
        loss.sum().backward()
    wanted = reduced([factors], "Average", 1 / 3.7, 3.7, size)
    problems = [differ(params[0].grad, wanted)]
    assert params[1].grad.is_sparse
    problems.append(differ(params[1].grad.to_dense()[:, 0], wanted))
    assert not any(problems), problems


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predivided_gradients_have_the_bits_of_factor_times_tensor(world, dtype):
    world.run(predivided, dtype)


def strides_and_kinds():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    params = {
        "channels last": convolution.weight,
        "float64": nn.Parameter(torch.ones(3, dtype=torch.float64)),
        "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        "bfloat16": nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
        "empty": nn.Parameter(torch.ones(0, 3)),
        "scalar": nn.Parameter(torch.tensor(1.0)),
        "gaps": nn.Parameter(torch.ones(4, 4)[:, ::2]),
    }
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), params.items())
    for _ in range(2):
        optimizer.zero_grad()
        loss = 0
        for p in params.values():
            weights = torch.arange(p.numel()).reshape(p.shape) + rank
            loss = loss + (p * weights.to(p.dtype)).sum().abs()
        loss.backward()
        for name, p in params.items():
            wanted = torch.arange(p.numel()).reshape(p.shape) + (size - 1) / 2
            torch.testing.assert_close(p.grad.abs().double(), wanted.double())
            assert p.grad.dtype == p.dtype, name
    assert params["channels last"].grad.stride() == convolution.weight.stride()


@pytest.mark.ranks(1, 2)
def test_parameters_of_any_strides_and_dtype_are_reduced(world):
    world.run(strides_and_kinds)


class Negated(Compressor):
    @classmethod
    def compress(cls, tensor):
        return -tensor, None


def bad_arguments():
    hvd.init()
    net = nn.Linear(2, 2)
    params = list(net.parameters())

    def make(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), **options)

    for options, text in (
        ({"named_parameters": params}, "tuples"),
        ({"named_parameters": net}, "got the model, a .*: pass model.named_parameters"),
        ({"named_parameters": [("a", params[0]), ("a", params[1])]}, "the same name: \\['a'\\]"),
        ({"named_parameters": [("a", params[0])]}, "1 of the optimizer's 2 parameters have no"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"backward_passes_per_step": True}, "True: expected a whole number"),
        ({"backward_passes_per_step": "2"}, "'2': expected a whole number"),
        ({"backward_passes_per_step": 1.0}, "1.0: expected a whole number"),
        ({"op": hvd.Max}, "Average, Sum or Adasum"),
        ({"op": 0}, "Average, Sum or Adasum"),
        ({"op": "Average"}, "Average, Sum or Adasum"),
        ({"gradient_predivide_factor": 0.0}, "0.0: expected a number greater than 0"),
        ({"gradient_predivide_factor": -1}, "-1: expected a number greater than 0"),
        ({"gradient_predivide_factor": float("nan")}, "nan: expected a number greater than 0"),
        ({"gradient_predivide_factor": float("inf")}, "inf: expected a number greater than 0"),
        ({"gradient_predivide_factor": 10**400}, "1000.*: expected a number .* into a float64"),
        ({"gradient_predivide_factor": "2"}, "'2': expected a number"),
        ({"op": hvd.Adasum, "gradient_predivide_factor": 2.0}, "needs op=Average, got"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average, got"),
        ({"groups": [[params[0]], params]}, "more than one group"),
        (
            {"groups": [params, [nn.Parameter(torch.zeros(3))]]},
            "0 of group 1 \\(shape \\[3\\]\\) is not a",
        ),
        ({"groups": [net.named_parameters()]}, "group 0 is not a list of parameters"),
        ({"groups": [[0, 1]]}, "group 0 is not a list of parameters"),
        ({"groups": [params[0], params[1]]}, "group 0 is not a list of parameters"),
        ({"groups": -1}, "groups=-1: expected a whole number, at least 1, or lists"),
        ({"groups": 0}, "groups=0: expected a whole number, at least 1"),
        ({"groups": True}, "groups=True: expected a whole number"),
        ({"groups": "2"}, "groups='2': expected a whole number"),
        ({"num_groups": -1}, "num_groups=-1: expected a whole number, at least 0"),
        ({"num_groups": "1"}, "num_groups='1': expected a whole number"),
        ({"num_groups": 1, "groups": 1}, "num_groups=1 and groups are both given"),
        ({"compression": "fp16"}, "'fp16': expected Compression.none, Compression.fp16 or"),
        ({"compression": None}, "None: expected Compression.none, Compression.fp16 or"),
        ({"compression": Negated}, "Negated'>: expected Compression.none, Compression.fp16 or"),
        ({"process_set": 1}, "process_set=1"),
        ({"process_set": hvd.ProcessSet([0])}, "not registered"),
    ):
        with pytest.raises(ValueError, match=text):
            make(**options)
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedOptimizer(make())
    assert not net.weight._post_accumulate_grad_hooks


@pytest.mark.ranks(1)
def test_bad_arguments_are_value_errors_at_construction(world):
    world.run(bad_arguments)


def several_groups():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def make(net):
        return torch.optim.SGD(
            [
                {"params": net[0].parameters(), "lr": 0.1, "momentum": 0.5},
                {"params": net[2].parameters(), "weight_decay": 0.1},
                {"params": [net[4].weight]},
                {"params": [net[4].bias], "lr": 0.0},
            ],
            lr=0.05,
        )

    alone, net = model(), model()
    reference, optimizer = make(alone), hvd.DistributedOptimizer(make(net), net.named_parameters())
    for step, (x, y) in enumerate(batches(8, 2, size)):
        if step == 4:
            reference.param_groups[3]["lr"] = optimizer.param_groups[3]["lr"] = 0.2
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
        optimizer.zero_grad()
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        optimizer.step()
        assert_same_parameters(net, alone)


@pytest.mark.ranks(2, 3)
def test_each_parameter_group_keeps_its_options(world):
    world.run(several_groups)


def runs_in_a_step(options):
    """How often the engine works in a step, and the gradients' sizes in order."""
    hvd.init()
    net = nn.ParameterList(torch.ones(i + 1) for i in range(5))
    params = list(net)
    if options.get("groups") == "lists":
        options = {**options, "groups": [[params[0], params[4]], [params[2]]]}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.25), **options)
    engine = worlds.current().team.engine
    for _ in range(3):
        optimizer.zero_grad()
        before = engine.counters()["operations"]
        sum((p * p * (hvd.rank() + 1)).sum() for p in params).backward()
        for p in params:
            # Of values that bfloat16 has.
            torch.testing.assert_close(p.grad, 2 * p.detach() * mean_over_ranks(lambda r: r + 1))
        optimizer.step()
    return engine.counters()["operations"] - before


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({}, 5),
        ({"groups": 1}, 1),
        ({"groups": 2}, 2),
        ({"num_groups": 4, "gradient_predivide_factor": 2.0}, 4),
        # Those in no group are reduced each by itself, at this bucket size.
        ({"groups": "lists", "gradient_predivide_factor": 2.0}, 4),
        ({"groups": "lists", "compression": hvd.Compression.bf16}, 4),
        ({"groups": 9}, 5),
    ],
)
def test_the_gradients_of_a_group_are_one_reduction(world, options, runs):
    knobs = {"HVDLITE_BUCKET_BYTES": "0", "HVDLITE_FIRST_BUCKET_BYTES": "0"}
    assert world.run(runs_in_a_step, options, knobs=knobs) == [runs] * world.size


def test_the_name_of_a_parameter_that_is_gone_is_nobody_elses():
    gone = torch.nn.Parameter(torch.ones(1))
    names = ParameterNames([("gone", gone)], list)
    assert names.of(gone, 3) == "gone"
    former = id(gone)
    del gone
    kept = []
    for _ in range(1000):
        kept.append(torch.nn.Parameter(torch.ones(1)))
        assert names.of(kept[-1], 3) == "parameter 3"
        if id(kept[-1]) == former:
            return


def hooks_and_places(options, knobs):
    """How many parameters have a hook, and whether `.grad` lies in a bucket, in a world of one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in knobs.items():
            patch.setenv(name, value)
        hvd.init()
        net = nn.Linear(3, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)
        optimizer.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        hooks = sum(bool(param._post_accumulate_grad_hooks) for param in net.parameters())
        storages = {param.grad.untyped_storage().data_ptr() for param in net.parameters()}
        optimizer.step()
        hvd.shutdown()
    return hooks, len(storages)


@pytest.mark.ranks(1)
def test_a_world_of_one_has_hooks_only_where_an_option_asks_for_them(world):
    def found(options=None, **knobs):
        return world.run(hooks_and_places, options or {}, knobs)[0]

    assert found() == (0, 2)
    assert found({"op": hvd.Sum, "groups": 1, "backward_passes_per_step": 2}) == (0, 2)
    assert found({"compression": hvd.Compression.bf16}) == (2, 1)
    assert found({"free_gradients": True}) == (2, 1)
    assert found(HVDLITE_CHECK_NUMERICS="1") == (2, 1)
    assert found(HVDLITE_DETERMINISTIC="virtual:1")[0] == 2


def world_that_grows():
    """Gradients after backward(), in a world of one and then in that of all ranks."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    hvd.init(comm=[rank])
    param = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0), op=hvd.Sum)
    found = []
    for step in range(4):
        if step == 1:
            hvd.shutdown()
        if step == 2:
            hvd.init()
        optimizer.zero_grad()
        (param.sum() * (rank + 1)).backward()
        found.append(param.grad.tolist())
        optimizer.step()
    alone, together = [rank + 1.0] * 2, [sum(range(size + 1)) * 1.0] * 2
    assert found == [alone, alone, together, together]


@pytest.mark.ranks(2)
def test_an_optimizer_of_a_world_of_one_sees_the_next_world_in_its_first_backward(world):
    world.run(world_that_grows)


def alone_with_weights_and_float8():
    hvd.init()
    params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2), requires_grad=False)]
    params[1].data = params[1].data.to(torch.float8_e4m3fn)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    optimizer.set_weight(2)
    params[0].sum().backward()
    optimizer.zero_grad()
    # The weight has counted: these passes have none.
    with optimizer.no_sync():
        params[0].sum().backward()
        params[0].sum().backward()
    assert params[0].grad.tolist() == [2.0]


@pytest.mark.ranks(1)
def test_a_world_of_one_takes_frozen_parameters_of_any_type_and_forgets_a_weight(world):
    world.run(alone_with_weights_and_float8)
