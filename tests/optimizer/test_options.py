"""The arguments of DistributedOptimizer, and which parameters it takes."""

import math
import re

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.compression import Compressor
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.world import world as worlds
from tests.core.scaling import differ, reduced
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import ONE_BY_ONE, mean_over_ranks, numbered, of_any_kind, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 3)
def test_predivided_gradients_have_the_bits_of_factor_times_tensor(dtype):
    """Every parameter is used once, so that this rank's gradient is its own factor."""
    rank, size = hvd.rank(), hvd.size()
    factors = [torch.linspace(-1.7, 3.1, 301 * (r + 1))[:301].to(dtype) for r in range(size)]
    dense = nn.Parameter(torch.ones(301, dtype=dtype))
    table = nn.Parameter(torch.ones(301, 1, dtype=dtype))
    optimizer = sgd([dense, table], gradient_predivide_factor=3.7)
    for _ in range(2):  # in the second round it is known that the rows need no place
        optimizer.zero_grad()
        rows = nn.functional.embedding(torch.arange(301), table, sparse=True)
        (dense * factors[rank] + rows[:, 0] * factors[rank]).sum().backward()
    wanted = reduced([factors], "Average", 1 / 3.7, 3.7, size)
    assert table.grad.is_sparse
    problems = [differ(grad, wanted) for grad in (dense.grad, table.grad.to_dense()[:, 0])]
    assert not any(problems), problems


@on_ranks(1, 2)
def test_parameters_of_any_strides_and_dtype_are_reduced():
    params = of_any_kind()
    optimizer = sgd(params.values(), names=params.items())
    for _ in range(2):
        optimizer.zero_grad()
        numbered(params.values(), hvd.rank()).backward()
        for name, p in params.items():
            wanted = torch.arange(p.numel()).reshape(p.shape) + (hvd.size() - 1) / 2
            assert torch.equal(p.grad, wanted.to(p.dtype)), name
    assert params["channels last"].grad.stride() == params["channels last"].stride()


class Negated(Compressor):
    @classmethod
    def compress(cls, tensor):
        return -tensor, None


WHOLE, NUMBER = "expected a whole number", "expected a number"
# By option and what the error expects, values that are refused.
REFUSED = [
    ("backward_passes_per_step", WHOLE, (0, True, "2", 1.0)),
    ("gradient_predivide_factor", NUMBER, (0.0, -1, math.nan, math.inf, "2", 10**400)),
    ("groups", WHOLE, (-1, 0, True, "2")),
    ("num_groups", WHOLE, (-1, "1")),
    ("compression", "expected Compression.none, Compression.fp16 or", ("fp16", None, Negated)),
    ("op", "Average, Sum or Adasum", (hvd.Max, 0, "Average")),
    ("process_set", "", (1,)),
    ("free_gradients", "expected True or False", ("yes",)),
]


@on_ranks(1)
def test_bad_arguments_are_value_errors_at_construction():
    net = nn.Linear(2, 2)
    a, b = net.parameters()
    stranger = nn.Parameter(torch.zeros(3))
    cases = [
        (
            {name: value},
            f"{name}=.*{'' if name == 'op' else re.escape(str(value)[:30])}.*{expected}",
        )
        for name, expected, values in REFUSED
        for value in values
    ]
    for options, text in (
        *cases,
        ({"named_parameters": [a, b]}, "tuples"),
        ({"named_parameters": net}, "got the model, a .*: pass model.named_parameters"),
        ({"named_parameters": [("a", a), ("a", b)]}, r"the same name: \['a'\]"),
        ({"named_parameters": [("a", a)]}, "1 of the optimizer's 2 parameters have no"),
        ({"op": hvd.Adasum, "gradient_predivide_factor": 2.0}, "needs op=Average, got"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average, got"),
        ({"op": hvd.Adasum, "free_gradients": True}, "does not go with op=Adasum"),
        ({"groups": [[a], [a, b]]}, "more than one group"),
        ({"groups": [[a], [stranger]]}, r"0 of group 1 \(shape \[3\]\) is not a"),
        ({"groups": [net.named_parameters()]}, "group 0 is not a list of parameters"),
        ({"groups": [[0, 1]]}, "group 0 is not a list of parameters"),
        ({"groups": [a, b]}, "group 0 is not a list of parameters"),
        ({"num_groups": 1, "groups": 1}, "num_groups=1 and groups are both given"),
        ({"process_set": hvd.ProcessSet([0])}, "not registered"),
    ):
        with pytest.raises(ValueError, match=f"(?s){text}"):
            hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=0.1), **options)
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedOptimizer(sgd([a, b]))
    assert not net.weight._post_accumulate_grad_hooks


@pytest.mark.wide_in(3)
@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({}, 5),
        ({"op": hvd.Sum}, 5),
        ({"compression": hvd.Compression.fp16}, 5),
        ({"groups": 1}, 1),
        ({"groups": 2}, 2),
        ({"num_groups": 4, "gradient_predivide_factor": 2.0}, 4),
        # Those in no group are reduced each by itself, at this bucket size.
        ({"groups": "lists", "gradient_predivide_factor": 2.0}, 4),
        ({"groups": "lists", "compression": hvd.Compression.bf16}, 4),
        ({"groups": 9}, 5),
    ],
)
@on_ranks(1, 2, 3, knobs=ONE_BY_ONE)
def test_the_gradients_of_a_group_are_one_reduction(options, runs):
    params = [nn.Parameter(torch.ones(i + 1)) for i in range(5)]
    if options.get("groups") == "lists":
        options = {**options, "groups": [[params[0], params[4]], [params[2]]]}
    optimizer = sgd(params, lr=0.25, **options)
    factor = mean_over_ranks(lambda r: 2 * r + 1) * (hvd.size() if "op" in options else 1)
    engine = worlds.current().team.engine
    for _ in range(3):
        optimizer.zero_grad()
        before = engine.counters()["operations"]
        sum((p * p * (2 * hvd.rank() + 1)).sum() for p in params).backward()
        for p in params:
            # Of values that 16 bits have.
            torch.testing.assert_close(p.grad, 2 * p.detach() * factor)
            assert p.grad.dtype == torch.float32
        optimizer.step()
    assert engine.counters()["operations"] - before == runs or hvd.size() == 1


def test_the_name_of_a_parameter_that_is_gone_is_nobody_elses():
    gone = nn.Parameter(torch.ones(1))
    names = ParameterNames([("gone", gone)], list)
    assert names.of(gone, 3) == "gone"
    former = id(gone)
    del gone
    kept = []
    while len(kept) < 1000 and former not in map(id, kept[-1:]):
        kept.append(nn.Parameter(torch.ones(1)))
        assert names.of(kept[-1], 3) == "parameter 3"


@pytest.mark.parametrize(
    ("options", "knobs", "found"),
    [
        ({}, {}, (0, 2)),
        ({"op": hvd.Sum, "groups": 1, "backward_passes_per_step": 2}, {}, (0, 2)),
        ({"compression": hvd.Compression.bf16}, {}, (2, 1)),
        ({"free_gradients": True}, {}, (2, 1)),
        ({}, {"HVDLITE_CHECK_NUMERICS": "1"}, (2, 1)),
        ({}, {"HVDLITE_DETERMINISTIC": "virtual:1"}, (2, 1)),
    ],
)
@on_ranks(1)
def test_a_world_of_one_has_hooks_only_where_an_option_asks_for_them(options, knobs, found):
    """How many parameters have a hook, and in how many storages `.grad` lies."""
    net = nn.Linear(3, 2)
    optimizer = sgd(net.parameters(), **options)
    net(torch.ones(1, 3)).sum().backward()
    hooks = sum(bool(param._post_accumulate_grad_hooks) for param in net.parameters())
    storages = {param.grad.untyped_storage().data_ptr() for param in net.parameters()}
    optimizer.step()
    assert (hooks, len(storages)) == found, knobs


@on_ranks()
def test_an_optimizer_outlives_its_world_and_sees_the_next_one_in_its_first_backward():
    """First a world of one."""
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    hvd.init(comm=[rank])
    param = nn.Parameter(torch.zeros(2))
    optimizer = sgd([param], lr=0.0, op=hvd.Sum)
    for step, factor in enumerate((rank + 1, rank + 1, *3 * [sum(range(size + 1))])):
        if step in (1, 4):
            hvd.shutdown()
        if step in (2, 4):
            hvd.init()
        optimizer.zero_grad()
        (param.sum() * (rank + 1)).backward()
        assert param.grad.tolist() == [factor] * 2
        optimizer.step()
    hvd.shutdown()
    optimizer.zero_grad()
    for needs_a_world in (param.sum().backward, lambda: sgd([nn.Parameter(torch.zeros(1))])):
        with pytest.raises(ValueError, match="init"):
            needs_a_world()


@on_ranks(1)
def test_a_world_of_one_takes_frozen_parameters_of_any_type_and_forgets_a_weight():
    params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2), requires_grad=False)]
    params[1].data = params[1].data.to(torch.float8_e4m3fn)
    optimizer = sgd(params)
    optimizer.set_weight(2)
    params[0].sum().backward()
    optimizer.zero_grad()
    # The weight has counted: these passes have none.
    with optimizer.no_sync():
        params[0].sum().backward()
        params[0].sum().backward()
    assert params[0].grad.tolist() == [2.0]
