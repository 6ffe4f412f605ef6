"""DistributedOptimizer beyond the plain loop."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvdlite as hvd
from hvdlite import reducer as reducers
from tests.training.models import (
    assert_bitwise_equal_on_all_ranks,
    assert_same_parameters,
    batches,
    loss_of,
    model,
    own,
)

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def mean_over_ranks(value_of):
    return sum(float(value_of(r)) for r in range(hvd.size())) / hvd.size()


def shares_everything():
    hvd.init()
    net = nn.Linear(3, 2)
    wrapped = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    optimizer = hvd.DistributedOptimizer(wrapped, net.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    for _ in range(2):
        assert wrapped.state is optimizer.state
        assert wrapped.param_groups is optimizer.param_groups
        assert wrapped.defaults is optimizer.defaults
        assert len(optimizer.state) == 2
        # Also after this.
        optimizer.load_state_dict(pickle.loads(pickle.dumps(copy.deepcopy(wrapped.state_dict()))))
    wrapped.load_state_dict(optimizer.state_dict())
    assert wrapped.state is optimizer.state
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    pickle.dumps(net)
    copy.deepcopy(net)


def test_wrapper_and_wrapped_share_state_groups_and_defaults_for_good(world):
    world.run(shares_everything)


class Custom(torch.optim.Optimizer):
    """A user's own: other arguments, a step without a closure."""

    def __init__(self, params, *, strength, name):
        super().__init__(params, {"strength": strength})
        self.name = name
        self.made = self.__dict__.get("made", 0) + 1

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["strength"])
        return "stepped"


def takes_a_users_own():
    hvd.init()
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(Custom([p], strength=0.5, name="mine"))
    assert isinstance(optimizer, Custom)
    assert (optimizer.name, optimizer.made) == ("mine", 1)
    (p * (hvd.rank() + 1)).sum().backward()
    assert optimizer.step() == "stepped"
    assert p.tolist() == [-0.5 * mean_over_ranks(lambda r: r + 1)] * 2


def test_a_users_own_optimizer_is_not_constructed_again(world):
    world.run(takes_a_users_own)


def step_hooks():
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    wrapped = torch.optim.SGD([p], lr=1.0)
    called = []
    wrapped.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer = hvd.DistributedOptimizer(wrapped)
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    for _ in range(2):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["pre", "post"] * 2


def test_hooks_of_the_step_run_once(world):
    world.run(step_hooks)


def unused_parameters():
    hvd.init()
    rank = hvd.rank()
    used, first_only, never = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, first_only, never], lr=1.0))
    for to_none in (True, False, True):
        loss = used.sum() * (rank + 1)
        if rank == 0:
            loss = loss + first_only.sum() * 4
        loss.backward()
        assert used.grad.tolist() == [mean_over_ranks(lambda r: r + 1)] * 3
        assert first_only.grad.tolist() == pytest.approx([4 / hvd.size()] * 3)
        assert never.grad is None
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        assert (used.grad is None) == to_none
        assert never.grad is None
    kept = torch.full((3,), 7.0)
    never.grad = kept
    used.sum().backward()
    assert never.grad is kept
    assert kept.tolist() == [7.0] * 3
    optimizer.step()


@pytest.mark.ranks(2, 3)
def test_a_missing_gradient_counts_as_zeros_unless_no_rank_has_one(world):
    world.run(unused_parameters)


def absent_everywhere_in_its_place():
    hvd.init()
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    (a.sum() + 3 * b.sum()).backward()
    optimizer.step()
    # Nobody zeroes b: its .grad, a place in the bucket, must survive a round without it.
    a.grad = None
    a.sum().backward()
    assert b.grad.tolist() == [3.0, 3.0]
    assert a.grad.tolist() == [1.0, 1.0]
    optimizer.step()


def test_a_gradient_that_no_rank_renews_stays_as_it_was(world):
    world.run(absent_everywhere_in_its_place)


def touches_nothing():
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(2))
    other = torch.zeros(2, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        ((p if rank == 0 else other) * 6).sum().backward()
        optimizer.step()
    assert p.tolist() == [-3 * 6.0 / hvd.size()] * 2


@pytest.mark.ranks(2, 3)
def test_a_rank_whose_backward_reaches_no_parameter_takes_part_in_step(world):
    world.run(touches_nothing)


def backward_in_parts():
    hvd.init()
    rank = hvd.rank()
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        (a * (rank + 1)).sum().backward()
        first = a.grad.clone()
        (b * 2).sum().backward()
        assert torch.equal(a.grad, first), "reduced once"
        assert first.tolist() == [sum(r + 1.0 for r in range(hvd.size()))] * 2
        assert b.grad.tolist() == [2.0 * hvd.size()] * 2
        optimizer.step()


@pytest.mark.ranks(1, 3)
def test_a_parameter_may_get_its_gradient_from_a_later_backward_of_the_step(world):
    world.run(backward_in_parts)


def second_backward():
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("layer.weight", p)])
    p.sum().backward()
    for retry in (lambda: p.sum().backward(), lambda: no_sync_backward()):

        def no_sync_backward():
            with optimizer.no_sync():
                p.sum().backward()

        with pytest.raises(
            RuntimeError, match=r"'layer.weight'.*backward_passes_per_step.*no_sync"
        ):
            retry()
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    p.grad = None
    p.sum().backward()
    # A discarded gradient may come again, as where GradScaler has skipped the step.
    p.grad = None
    p.sum().backward()
    assert p.grad.tolist() == [1.0, 1.0]


def test_a_second_backward_before_step_is_an_error_that_says_what_to_do(world):
    world.run(second_backward)


def adversaries():
    hvd.init()
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    of_generator = hvd.DistributedOptimizer(torch.optim.SGD(generator.parameters(), lr=0.1))
    of_critic = hvd.DistributedOptimizer(torch.optim.SGD(critic.parameters(), lr=0.1))
    for _ in range(3):
        of_generator.zero_grad()
        critic(generator(torch.randn(4, 2))).mean().backward()
        of_generator.step()
        of_critic.zero_grad()
        critic(generator(torch.randn(4, 2)).detach()).mean().backward()
        of_critic.step()
    assert_bitwise_equal_on_all_ranks(generator)
    assert_bitwise_equal_on_all_ranks(critic)


def test_two_optimizers_may_share_a_backward(world):
    world.run(adversaries)


def frozen_and_thawed():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()

    def freeze(which, frozen):
        for module in (alone, net):
            for p in module[which].parameters():
                p.requires_grad_(not frozen)

    freeze(0, True)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters()
    )
    for step, (x, y) in enumerate(batches(16, 2, size)):
        if step == 4:
            freeze(0, False)
        if step == 8:
            freeze(2, True)
        if step % 4 != 2:
            optimizer.zero_grad()
        else:
            net.zero_grad()
        if step == 12:
            freeze(2, False)
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        optimizer.step()
        assert_same_parameters(net, alone)


@pytest.mark.ranks(2, 3)
def test_parameters_may_be_frozen_and_thawed_between_steps(world):
    world.run(frozen_and_thawed)


def thawed_alone():
    hvd.init()
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    b.requires_grad_()
    # Only the parameter without a hook gets a gradient.
    (b * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert b.item() == -mean_over_ranks(lambda r: r + 1)
    c = nn.Parameter(torch.zeros(1))
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [c], "lr": 2.0})
    (a + c * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert (a.item(), c.item()) == (-1.0, -2 * mean_over_ranks(lambda r: r + 1))


def test_a_parameter_that_was_thawed_or_added_is_reduced_at_once(world):
    world.run(thawed_alone)


def steps_with_a_closure():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for x, y in batches(5, 2, size):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(net, own(x, rank, size), own(y, rank, size))
            loss.backward()
            return loss

        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
        assert optimizer.step(closure).ndim == 0
        optimizer.step(closure=closure)
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
    assert_same_parameters(net, alone)


def test_the_gradients_of_a_closure_are_reduced_before_the_step(world):
    world.run(steps_with_a_closure)


def many_evaluations():
    hvd.init()
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    wrapped = torch.optim.LBFGS([p], lr=0.5, max_iter=8)
    optimizer = hvd.DistributedOptimizer(wrapped)

    def closure():
        optimizer.zero_grad()
        loss = ((p - hvd.rank()) ** 2).sum()
        loss.backward()
        return hvd.allreduce(loss.detach())

    for _ in range(4):
        optimizer.step(closure)
    assert p.tolist() == pytest.approx([mean_over_ranks(lambda r: r)] * 2, abs=1e-3)


def test_a_closure_may_be_evaluated_many_times(world):
    world.run(many_evaluations)


def passes():
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), backward_passes_per_step=2)
    (p * (rank + 1)).backward()
    assert p.grad.item() == rank + 1, "not reduced yet"
    (p * 10).backward()
    assert p.grad.item() == 10 + mean_over_ranks(lambda r: r + 1)
    optimizer.step()
    optimizer.zero_grad()
    (p * (rank + 1)).backward()
    optimizer.step()
    assert p.grad.item() == mean_over_ranks(lambda r: r + 1), "reduced by step"
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    (p * (rank + 1)).backward()
    assert p.grad.item() == mean_over_ranks(lambda r: r + 1)
    with pytest.raises(ValueError, match="at least 1"):
        optimizer.set_backward_passes_per_step(0)


def test_every_nth_backward_communicates_and_step_sees_to_the_rest(world):
    world.run(passes)


def synchronizes():
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
    (p * 2).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert p.item() == -2 * hvd.size()
    for attempt in range(2):
        optimizer.zero_grad()
        (p * 2).backward()
        optimizer.synchronize()
        if attempt == 0:
            with pytest.warns(UserWarning, match="skip_synchronize"):
                optimizer.step()
        else:
            optimizer.step()
    assert p.item() == -3 * 2 * hvd.size(), "reduced once each"


def test_step_after_synchronize_warns_once_and_does_not_reduce_twice(world):
    world.run(synchronizes)


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


def sparse_gradients():
    hvd.init()
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=True
    )
    table(torch.tensor([hvd.rank()])).sum().backward()
    wanted = torch.zeros(5, 2)
    wanted[: hvd.size()] = 1 / hvd.size()
    torch.testing.assert_close(table.weight.grad, wanted)
    optimizer.step()
    other = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=1.0), other.named_parameters()
    )
    with pytest.raises(ValueError, match="'weight' is sparse; pass sparse_as_dense"):
        other(torch.tensor([0])).sum().backward()


def test_sparse_gradients_are_made_dense_or_refused(world):
    world.run(sparse_gradients)


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


def bad_arguments():
    hvd.init()
    net = nn.Linear(2, 2)
    params = list(net.parameters())

    def make(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), **options)

    for options, text in (
        ({"named_parameters": params}, "tuples"),
        ({"named_parameters": [("a", params[0]), ("a", params[1])]}, "named \\['a'\\]"),
        ({"named_parameters": [("a", params[0])]}, "1 of the optimizer's 2 parameters are not"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"op": hvd.Max}, "Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average only"),
        ({"groups": [[params[0]], params]}, "more than one group"),
        ({"groups": -1}, "not negative"),
        ({"compression": "fp16"}, "compression"),
        ({"process_set": 1}, "process_set=1"),
    ):
        with pytest.raises(ValueError, match=text):
            make(**options)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(make())
    assert not net.weight._post_accumulate_grad_hooks


@pytest.mark.ranks(1)
def test_bad_arguments_are_value_errors_at_construction(world):
    world.run(bad_arguments)


def lives_and_dies():
    hvd.init()
    net = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    first = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), op=hvd.Sum)
    second = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), op=hvd.Sum)
    net(x).sum().backward()
    assert net.bias.grad.tolist() == [float(hvd.size())] * 2, "reduced once, by the newest"
    first.step()
    second.step()
    del first, second
    gc.collect()
    assert not net.weight._post_accumulate_grad_hooks
    assert not reducers._alive
    net.zero_grad()
    net(x).sum().backward()
    assert net.bias.grad.tolist() == [1.0, 1.0]


def test_a_parameter_belongs_to_the_newest_optimizer_and_to_none_when_it_is_gone(world):
    world.run(lives_and_dies)


def begins_again():
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        (p * (hvd.rank() + 1)).backward()
        assert p.grad.item() == mean_over_ranks(lambda r: r + 1)
        optimizer.step()
        hvd.shutdown()
        hvd.init()
    hvd.shutdown()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="init"):
        p.backward()
    with pytest.raises(ValueError, match="init"):
        hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))


def test_an_optimizer_outlives_shutdown_and_init(world):
    world.run(begins_again)


def backward_raises():
    hvd.init()
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("in backward")

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    with pytest.raises(KeyError):
        (Raises.apply(a * 2) + b).backward()
    with pytest.raises(RuntimeError, match="did not end; call synchronize"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()
    (a * 2 + b).backward()
    assert (a.grad.item(), b.grad.item()) == (2.0, 1.0)
    optimizer.step()


def test_zero_grad_in_the_middle_of_a_reduction_is_an_error(world):
    world.run(backward_raises)


def checkpoints(reentrant, passes):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), backward_passes_per_step=passes
    )
    for step, (x, y) in enumerate(batches(4 * passes, 2, size)):
        loss_of(alone, x, y).backward()
        hidden = own(x, rank, size).requires_grad_()
        for part in (net[:2], net[2:4]):
            hidden = checkpoint(part, hidden, use_reentrant=reentrant)
        loss_of(net[4], hidden, own(y, rank, size)).backward()
        if step % passes == passes - 1:
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
            for each in (reference, optimizer):
                each.step()
                each.zero_grad()
        else:
            assert rank == 0 or not torch.equal(net[0].weight.grad, alone[0].weight.grad)
    assert_same_parameters(net, alone)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_of_a_model_are_reduced_alike(world, reentrant, passes):
    world.run(checkpoints, reentrant, passes)


def differs():
    hvd.init()
    p = nn.Parameter(torch.zeros(2 + hvd.rank()))
    hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    with pytest.raises(hvd.HorovodInternalError, match="DistributedOptimizer") as caught:
        p.sum().backward()
    optimizer.zero_grad()
    hvd.barrier()
    return str(caught.value)


def test_models_that_differ_are_an_error_on_every_rank(world):
    assert len(set(world.run(differs))) == 1
