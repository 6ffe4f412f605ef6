"""The distributed optimizer is the wrapped one, and does not outlive its world or its user."""

import copy
import gc
import inspect
import pickle
from typing import ClassVar

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer import together
from hvdlite.world import world as worlds
from tests.optimizer.models import (
    assert_same_parameters,
    batches,
    loss_of,
    mean_over_ranks,
    model,
    own,
)

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def shares_everything():
    hvd.init()
    torch.manual_seed(0)
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


class Registered(torch.optim.SGD):
    """Keeps a register of its subclasses."""

    kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, tag):
        assert tag not in cls.kinds
        assert cls.__name__ not in {kind.__name__ for kind in cls.kinds.values()}
        cls.kinds[tag] = cls


class Known(Registered, tag="known"):
    pass


def leaves_the_register_alone(op):
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(Known([p], lr=1.0), op=op)
    assert isinstance(optimizer, Known)
    p.sum().backward()
    optimizer.step()
    assert p.tolist() == [-1.0, -1.0]
    assert Registered.kinds == {"known": Known}


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_class_that_registers_its_subclasses_does_not_learn_of_the_wrappers(world, op):
    world.run(leaves_the_register_alone, op)


class Around(torch.optim.Optimizer):
    """Has nothing but another optimizer, and delegates the rest to it."""

    def __init__(self, inner):
        self.__dict__["inner"] = inner

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    @property
    def defaults(self):
        return self.inner.defaults

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


def wraps_a_wrapper(op):
    hvd.init()
    p, added = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([p], lr=1.0)
    optimizer = hvd.DistributedOptimizer(Around(inner), op=op)
    assert optimizer.param_groups is inner.param_groups
    for _ in range(2):
        optimizer.zero_grad()
        (p.sum() + added.sum()).backward()
        optimizer.step()
        if len(inner.param_groups) == 1:
            inner.add_param_group({"params": [added], "lr": 2.0})
    assert p.tolist() == [-2.0, -2.0]
    assert added.tolist() == [-2.0]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_an_optimizer_whose_groups_are_those_of_another_can_be_wrapped(world, op):
    world.run(wraps_a_wrapper, op)


def steps_of_its_own():
    """An optimizer that another one has replaced steps with its rank's own gradients."""
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    replaced = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    p.sum().backward()
    optimizer.step()
    if hvd.rank() == 0:
        replaced.step()
    hvd.barrier()
    hvd.shutdown()
    replaced.step()
    return p.tolist()


def test_an_optimizer_that_another_has_replaced_steps_after_the_world_has_ended(world):
    assert world.run(steps_of_its_own) == [[-3.0, -3.0], [-2.0, -2.0]]


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


def lives_and_dies():
    hvd.init()
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    first = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), op=hvd.Sum)
    second = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), op=hvd.Sum)
    engine = worlds.current().team.engine
    for _ in range(2):
        net.zero_grad()
        before = engine.counters()["operations"]
        net(x).sum().backward()
    assert net.bias.grad.tolist() == [float(hvd.size())] * 2
    assert engine.counters()["operations"] - before == 1, "reduced once, by the newest"
    first.step()
    second.step()
    del first, second
    gc.collect()
    assert not net.weight._post_accumulate_grad_hooks
    assert not together.alive
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


def refuses_to_be_copied():
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    wrapped = torch.optim.Adam([p], lr=0.1)
    optimizer = hvd.DistributedOptimizer(wrapped)
    p.sum().backward()
    optimizer.step()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="or copy the optimizer before wrapping"):
            copied(optimizer)
    # What the user had before is the user's, and knows nothing of hvdlite.
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(twin) is torch.optim.Adam
        assert not any("hvdlite" in name for name in vars(twin))
    assert not any("hvdlite" in name for name in vars(wrapped))
    saved = optimizer.state_dict()
    for twin in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        torch.testing.assert_close(twin, saved, rtol=0, atol=0)
        optimizer.load_state_dict(twin)


@pytest.mark.ranks(1)
def test_state_dicts_and_wrapped_optimizers_can_be_copied_but_not_the_wrapper(world):
    world.run(refuses_to_be_copied)


def loads_in_mid_training():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    make = {"lr": 0.01, "betas": (0.8, 0.9)}
    reference = torch.optim.Adam(alone.parameters(), **make)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), **make))
    saved = {}
    for step, (x, y) in enumerate(batches(12, 2, size)):
        for each, name in ((reference, "reference"), (optimizer, "optimizer")):
            if step == 3:
                saved[name] = pickle.dumps(copy.deepcopy(each.state_dict()))
            if step in (6, 9):
                each.load_state_dict(pickle.loads(saved[name]))
            if step == 9:
                each.param_groups[0]["lr"] = 0.02
            each.zero_grad()
        loss_of(alone, x, y).backward()
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        reference.step()
        optimizer.step()
        assert_same_parameters(net, alone)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {6.0}


@pytest.mark.ranks(2, 3)
def test_load_state_dict_in_mid_training_goes_back_to_that_state(world):
    world.run(loads_in_mid_training)


class WithScaler(torch.optim.SGD):
    """Undoes GradScaler's scaling itself, in the older of the two ways that torch has."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        grad_scaler.unscale_(self)
        found = self.found = sum(map(float, grad_scaler._found_inf_per_device(self).values()))
        return None if found else super().step(closure)


def looks_like_the_wrapped_step():
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(WithScaler([p], lr=1.0))
    assert inspect.signature(optimizer.step) == inspect.signature(WithScaler([p], lr=1.0).step)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(p * (hvd.rank() + 1)).sum().backward()
    with pytest.warns(FutureWarning, match="passing itself as a keyword"):
        scaler.step(optimizer)
    assert p.item() == -mean_over_ranks(lambda r: r + 1)


def test_the_step_has_the_signature_of_the_wrapped_one(world):
    world.run(looks_like_the_wrapped_step)
