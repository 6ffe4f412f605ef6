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
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import OPTIMIZERS, Twins, batches, mean_over_ranks, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def copies(value):
    return copy.deepcopy(value), pickle.loads(pickle.dumps(value))


@on_ranks()
def test_wrapper_and_wrapped_share_state_groups_and_defaults_for_good():
    net = nn.Linear(3, 2)
    wrapped = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    called = []
    wrapped.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer = hvd.DistributedOptimizer(wrapped, net.named_parameters())
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    for loads in (lambda: None, optimizer.load_state_dict, wrapped.load_state_dict):
        if called:
            loads(copies(wrapped.state_dict())[1])
        net(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        for name in ("state", "param_groups", "defaults"):
            assert getattr(wrapped, name) is getattr(optimizer, name)
        assert len(optimizer.state) == 2
    assert called == ["pre", "post"] * 3, "hooks of the step run once"
    copies(net)


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


@on_ranks()
def test_a_users_own_optimizer_is_not_constructed_again():
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(Custom([p], strength=0.5, name="mine"))
    assert isinstance(optimizer, Custom)
    assert (optimizer.name, optimizer.made) == ("mine", 1)
    (p * (hvd.rank() + 1)).sum().backward()
    assert optimizer.step() == "stepped"
    assert p.tolist() == [-0.5 * mean_over_ranks(lambda r: r + 1)] * 2


class Registered(torch.optim.SGD):
    """Keeps a register of its subclasses."""

    kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, tag):
        assert tag not in cls.kinds
        cls.kinds[tag] = cls


class Known(Registered, tag="known"):
    pass


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@on_ranks()
def test_a_class_that_registers_its_subclasses_does_not_learn_of_the_wrappers(op):
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(Known([p], lr=1.0), op=op)
    assert isinstance(optimizer, Known)
    p.sum().backward()
    optimizer.step()
    assert p.tolist() == [-1.0, -1.0]
    assert Registered.kinds == {"known": Known}


class Around(torch.optim.Optimizer):
    """Has nothing but another optimizer, and delegates the rest to it."""

    def __init__(self, inner):
        self.__dict__["inner"] = inner

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@on_ranks()
def test_an_optimizer_whose_groups_are_those_of_another_can_be_wrapped(op):
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


@on_ranks()
def test_a_parameter_belongs_to_the_newest_optimizer_and_to_none_when_it_is_gone():
    p = nn.Parameter(torch.zeros(2))
    first, second = sgd([p], op=hvd.Sum), sgd([p], op=hvd.Sum)
    engine = worlds.current().team.engine
    for _ in range(2):
        p.grad = None
        before = engine.counters()["operations"]
        p.sum().backward()
    assert p.grad.tolist() == [float(hvd.size())] * 2
    assert engine.counters()["operations"] - before == 1, "reduced once, by the newest"
    second.step()
    # The other one steps with what is there, also alone and after the world has ended.
    if hvd.rank() == 0:
        first.step()
    hvd.barrier()
    hvd.shutdown()
    first.step()
    hvd.init()
    assert p.tolist() == [-6.0 if hvd.rank() == 0 else -4.0] * 2
    del first, second
    gc.collect()
    assert not p._post_accumulate_grad_hooks
    assert not together.alive
    p.grad = None
    p.sum().backward()
    assert p.grad.tolist() == [1.0, 1.0]


@on_ranks(1)
def test_state_dicts_and_wrapped_optimizers_can_be_copied_but_not_the_wrapper():
    p = nn.Parameter(torch.zeros(2))
    wrapped = torch.optim.Adam([p], lr=0.1)
    optimizer = hvd.DistributedOptimizer(wrapped)
    p.sum().backward()
    optimizer.step()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="or copy the optimizer before wrapping"):
            copied(optimizer)
    # What the user had before is the user's, and knows nothing of hvdlite.
    for one in (wrapped, *copies(wrapped)):
        assert type(one) is torch.optim.Adam
        assert not any("hvdlite" in name for name in vars(one))
    saved = optimizer.state_dict()
    for twin in copies(saved):
        torch.testing.assert_close(twin, saved, rtol=0, atol=0)
        optimizer.load_state_dict(twin)


def adam(params):
    """Two groups with options of their own."""
    params = list(params)
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.1, "lr": 0.03}]
    return OPTIMIZERS["Adam"](groups)


@on_ranks(2, 3)
def test_load_state_dict_in_mid_training_goes_back_to_that_state():
    twins = Twins(adam)
    for step, batch in enumerate(batches(12, 2, hvd.size())):
        if step == 3:
            saved = [pickle.dumps(optimizer.state_dict()) for _, optimizer in twins.both]
        if step in (6, 9):
            for (_, optimizer), state in zip(twins.both, saved, strict=True):
                optimizer.load_state_dict(pickle.loads(state))
                optimizer.param_groups[0]["lr"] = 0.01 if step == 6 else 0.02
        twins.train([batch])
    assert {float(state["step"]) for state in twins.optimizer.state.values()} == {6.0}


class WithScaler(torch.optim.SGD):
    """Undoes GradScaler's scaling itself, in the older of the two ways that torch has."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        grad_scaler.unscale_(self)
        found = self.found = sum(map(float, grad_scaler._found_inf_per_device(self).values()))
        return None if found else super().step(closure)


@on_ranks()
def test_the_step_has_the_signature_of_the_wrapped_one():
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(WithScaler([p], lr=1.0))
    assert inspect.signature(optimizer.step) == inspect.signature(WithScaler([p], lr=1.0).step)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(p * (hvd.rank() + 1)).sum().backward()
    with pytest.warns(FutureWarning, match="passing itself as a keyword"):
        scaler.step(optimizer)
    assert p.item() == -mean_over_ranks(lambda r: r + 1)
