"""GradScaler on gradients of which each rank has parts: simulated ranks in one process."""

import pytest
import torch

from hvdlite.optimizer.sharding import scaling


class Rank(torch.optim.SGD):
    """An optimizer that shows a GradScaler what a sharded one does."""

    bad_elsewhere = False
    asked = 0

    def __init__(self, param, grad):
        super().__init__([param], lr=1.0)
        self.part = param.detach()[1:3]
        self.part.grad = grad

    @property
    def param_groups(self):
        if not scaling.scaler_is_caller():
            return self.__dict__["param_groups"]
        self.asked += 1
        return scaling.groups_for_scaler([self.part], torch.device("cpu"), self.largest_of_all)

    @param_groups.setter
    def param_groups(self, groups):
        self.__dict__["param_groups"] = groups

    def largest_of_all(self, found):
        return torch.maximum(found, torch.tensor([float(self.bad_elsewhere)]))

    def step(self, closure=None):
        self.part -= self.part.grad


def scaler():
    made = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    made.scale(torch.zeros(()))
    return made


def parameter():
    return torch.nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize("explicit", [False, True])
def test_the_owned_part_is_unscaled_once_and_steps(explicit):
    param, scale = parameter(), scaler()
    rank = Rank(param, torch.tensor([4.0, 8.0]))
    if explicit:
        scale.unscale_(rank)
        assert rank.part.grad.tolist() == [1.0, 2.0]
    scale.step(rank)
    scale.update()
    assert rank.asked == 1
    assert param.tolist() == [0.0, -1.0, -2.0, 0.0]
    assert scale.get_scale() == 4.0


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("bad", ["here", "elsewhere"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_gradient_on_any_rank_makes_every_rank_skip(explicit, bad, value):
    param, scale = parameter(), scaler()
    rank = Rank(param, torch.tensor([4.0, value if bad == "here" else 8.0]))
    rank.bad_elsewhere = bad == "elsewhere"
    if explicit:
        scale.unscale_(rank)
    scale.step(rank)
    scale.update()
    assert param.tolist() == [0.0] * 4
    assert scale.get_scale() == 2.0


@pytest.mark.parametrize("bad", [False, True])
def test_a_rank_that_owns_nothing_decides_as_the_others_do(bad):
    scale = scaler()
    rank = Rank(parameter(), None)
    rank.bad_elsewhere = bad
    rank.step = lambda: None
    scale.step(rank)
    scale.update()
    assert scale.get_scale() == (2.0 if bad else 4.0)


def test_unscaling_twice_is_the_error_of_torch():
    scale, rank = scaler(), Rank(parameter(), torch.ones(2))
    scale.unscale_(rank)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scale.unscale_(rank)


def test_other_callers_see_the_parameter_groups():
    param = parameter()
    rank = Rank(param, torch.ones(2))
    assert rank.param_groups[0]["params"][0] is param
    assert rank.state_dict()["param_groups"][0]["lr"] == 1.0


def test_gradients_of_float16_are_refused_as_in_one_process():
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler().unscale_(Rank(param, torch.ones(2, dtype=torch.float16)))
