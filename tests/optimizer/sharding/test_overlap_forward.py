"""With overlap_forward, `step` returns while parameters are in flight, and reads through the model
wait for them."""

import copy
import io
import os
import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import Pair
from tests.optimizer.sharding.late import Late
from tests.optimizer.sharding.models import SMALL_BUCKETS, batch, differences, groups_of, odd


class Reader(nn.Module):
    """Reads parameters of children that it does not call, and one of a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden = nn.LSTM(8, 8, batch_first=True)
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(1)])
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.out = nn.Linear(8, 7)
        self.out.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        x = self.norm(self.attention(x, x, x, need_weights=False)[0] * self.scales[0])
        x = self.hidden(x)[0]
        return nn.functional.linear(x, self.embed.weight, self.out.bias) * self.scales[1]


def reader():
    torch.manual_seed(1)
    return Reader()


def words(step):
    generator = torch.Generator().manual_seed(1000 * hvd.rank() + step)
    return torch.randint(7, (2, 5), generator=generator)


class Whole(torch.optim.Adam):
    """Gets whole parameters, as it could look at them."""


MODELS = {"odd": (odd, batch), "reader": (reader, words)}
KINDS = {"Adam": torch.optim.Adam, "whole": Whole}


@pytest.mark.wide_in(2)
@pytest.mark.parametrize(
    ("model", "kind", "shard"),
    [
        ("odd", "Adam", True),
        ("odd", "Adam", "host"),
        ("reader", "Adam", True),
        ("odd", "whole", True),
    ],
)
@on_ranks(2, 3, hosts=("2,1", "1,1,1"), knobs=SMALL_BUCKETS)
def test_every_step_has_the_bits_of_the_unsharded_one(model, kind, shard):
    make, data = MODELS[model]
    pair = Pair(lambda net: KINDS[kind](groups_of(net, lr=0.01)), make(), shard=shard, overlap=True)
    average, expected = map(torch.optim.swa_utils.AveragedModel, (pair.net, pair.alone))
    for step in range(6):
        found, wanted = pair.backward(step, lambda net, step: net(data(step)).square().mean())
        assert torch.equal(found, wanted), f"before step {step}"
        pair.step()
        if step % 2:
            # In the other steps only the forward reads.
            average.update_parameters(pair.net)
            expected.update_parameters(pair.alone)
    pair.compare()
    assert differences(average, expected) == []
    hvd.barrier()


def by_forward(late):
    x = late.data(9)
    assert torch.equal(late.net(x), late.alone(x))


def by_inference(late):
    with torch.inference_mode():
        by_forward(late)


def by_parameters(late):
    late.compare()


def by_state_dict(late):
    found, expected = late.net.state_dict(), late.alone.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def is_an_ordinary_model(twin, expected):
    assert all(type(module._parameters) is dict for module in twin.modules())
    assert differences(twin, expected) == []
    assert twin.tied.weight is twin.again.weight


def by_deepcopy(late):
    is_an_ordinary_model(copy.deepcopy(late.net), late.alone)


def by_pickle(late):
    file = io.BytesIO()
    torch.save(late.net, file)
    assert b"hvdlite" not in file.getvalue()
    file.seek(0)
    is_an_ordinary_model(torch.load(file, weights_only=False), late.alone)


def by_dict(late):
    for module, expected in zip(late.net.modules(), late.alone.modules(), strict=True):
        for found in ({**module._parameters}, dict(module._parameters), module._parameters | {}):
            assert str(found) == str(expected._parameters)
    assert repr(late.net._parameters) == repr(late.alone._parameters)


def by_functional_call(late):
    x = late.data(9)
    params = dict(zip(dict(late.alone.named_parameters()), late.held, strict=True))
    expected = late.alone(x)
    assert torch.equal(torch.func.functional_call(late.net, params, x), expected)


def by_list_after_waiting(late):
    late.cut.wait_for_parameters()
    assert not late.held_differ()


def by_broadcast(late):
    hvd.broadcast_parameters(late.held, 0)
    assert not late.held_differ()


def by_trace(late):
    x = late.data(9)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        traced = torch.jit.trace(late.net, x)
    assert torch.equal(traced(x), late.alone(x))


def by_fork(late):
    child = os.fork()
    if not child:
        os._exit(late.held_differ())
    assert os.waitpid(child, 0)[1] == 0


def by_frozen_rest(late):
    late.net.requires_grad_(False)
    by_forward(late)
    late.net.requires_grad_(True)


READS = {
    name.removeprefix("by_"): case for name, case in list(globals().items()) if name[:3] == "by_"
}


@pytest.mark.wide_in("1,1")
@pytest.mark.mpis("mpich")
@pytest.mark.parametrize("how", READS)
@on_ranks(2, hosts=("1,1",), knobs=SMALL_BUCKETS)
def test_a_read_waits_for_parameters_that_other_ranks_have_not_sent_yet(how):
    late = Late()
    late.backward(1)
    late.step()
    READS[how](late)
    late.backward(2)
    late.cut.step()
    late.compare()
    hvd.barrier()
