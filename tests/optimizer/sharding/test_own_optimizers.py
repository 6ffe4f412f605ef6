"""Optimizers of the user's own, element-wise or not, and options of torch's."""

import functools
import warnings

import pytest
import torch

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import Pair, same_full, train_alike
from tests.optimizer.sharding.models import groups_of, odd, optimizer_of


class Signs(torch.optim.Optimizer):
    """Goes by the sign of an average; options of its own; written as torch's tutorials do it."""

    hvdlite_elementwise = True

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["calls"] = 0
                    state["average"] = torch.zeros_like(param)
                state["calls"] += 1
                state["average"].lerp_(param.grad, 1 - group["beta"])
                param.add_(state["average"].sign(), alpha=-group["lr"] / state["calls"])
        return loss


def with_gradients(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield group, param


class Decayed(torch.optim.Adam):
    """Adam with something before and after its step."""

    hvdlite_elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for group, param in with_gradients(self):
            param.mul_(1 - group["lr"])
        loss = super().step(closure)
        for _, param in with_gradients(self):
            param.clamp_(-0.25, 0.25)
        return loss


class Renamed(torch.optim.SGD):
    """Nothing but a name."""

    hvdlite_elementwise = True


class Scaled(torch.optim.SGD):
    """Looks at whole parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, param in with_gradients(self):
            state = self.state[param]
            state["seen"] = state.get("seen", 0) + 1
            param.sub_(group["lr"] * param.grad / (param.grad.norm() + 1))


KINDS = {"own": Signs, "around Adam's step": Decayed, "of SGD": Renamed, "of whole": Scaled}


@pytest.mark.wide_in(2, "1,1")
@pytest.mark.parametrize(("shard", "shared"), [(True, False), ("host", True), (False, True)])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, hosts=("2,1", "1,1"))
def test_own_optimizers_have_the_bits_of_unsharded_ones(kind, shard, shared):
    # Its step has torch's hooks then, which run also where a subclass calls it.
    torch.optim.Adam(odd().parameters())
    plain, cut = train_alike(
        lambda net: KINDS[kind](groups_of(net, lr=0.01), lr=0.01), shard=shard, shared=shared
    )
    assert cut._hvdlite_update.shards.elementwise == (kind != "of whole")
    same_full(cut.full_state_dict(), plain)
    if shard is True and kind == "of whole":
        owned = torch.tensor(sum(len(state) > 0 for state in cut.state.values()))
        assert hvd.allreduce(owned, op=hvd.Sum) == len(plain.state)


OPTIONS = {
    "maximize": (torch.optim.Adam, {"maximize": True}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    "tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "fused tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01), "fused": True}),
    "tensor SGD": (torch.optim.SGD, {"lr": torch.tensor(0.01), "momentum": 0.5}),
}


@pytest.mark.mpis("mpich")
@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_options_have_the_effect_that_they_have_unsharded(name):
    kind, options = OPTIONS[name]

    def make(net):
        own = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in options.items()}
        return kind(net.parameters(), **{"lr": 0.01, **own})

    plain, cut = train_alike(make)
    same_full(cut.full_state_dict(), plain)
    rates = [each.param_groups[0]["lr"] for each in (plain, cut)]
    assert rates[0] == rates[1] < 0.01
    assert type(rates[0]) is type(rates[1]) is type(options.get("lr", 0.01))


@pytest.mark.wide
@pytest.mark.mpis("mpich")
@on_ranks(2)
def test_a_compiled_step_has_the_bits_of_an_unsharded_one():
    pair = Pair(functools.partial(optimizer_of, "momentum"))

    @torch.compile(backend="eager")
    def compiled_step():
        pair.cut.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Dynamo can't trace, and so runs as it is
        for step in range(3):
            pair.backward(step)
            pair.plain.step()
            compiled_step()
            pair.compare(f"after step {step}")
