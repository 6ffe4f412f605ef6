"""check_parameters and HVDLITE_CHECK_PARAMETERS: which rank is wrong, and in what."""

import os
import pickle
import random
import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.errors import DifferenceError
from hvdlite.optimizer.checks.fingerprints import bytes_of
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import (
    OPTIMIZERS,
    SGD,
    batches,
    log,
    loss_of,
    mine,
    model,
    same_on_all_ranks,
    sgd,
)

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

CHECK = "HVDLITE_CHECK_PARAMETERS"


def train(net, optimizer, steps, of=hvd.global_process_set):
    for x, y in batches(steps, 2, of.size()):
        optimizer.zero_grad()
        loss_of(net, *mine(x, y, of=of)).backward()
        optimizer.step()


def trained(net, make=SGD, steps=2, **options):
    made = hvd.DistributedOptimizer(make(net.parameters()), net.named_parameters(), **options)
    train(net, made, steps)
    return made


def flip(tensor, bit):
    tensor.detach().reshape(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def bits_of(tensors):
    return {key: bytes_of(value).numpy().tobytes() for key, value in tensors.items()}


@on_ranks(3, 4)
def test_every_flipped_bit_is_found_with_its_tensor_and_its_rank_and_repaired():
    """Bits of parameters and of state, each on one rank."""
    net = model()
    optimizer = trained(net, OPTIMIZERS["Adam"])
    places = dict(net.named_parameters())
    for name, param in net.named_parameters():
        places |= {f"{key} of {name}": value for key, value in optimizer.state[param].items()}
    assert hvd.check_parameters(net, optimizer) == []
    before = bits_of(places)
    chance = random.Random(7)
    for _ in range(100):
        rank, name = chance.randrange(hvd.size()), chance.choice(sorted(places))
        bit = chance.randrange(8 * places[name].nbytes)
        if hvd.rank() == rank:
            flip(places[name], bit)
        with pytest.raises(DifferenceError) as caught:
            hvd.check_parameters(net, optimizer)
        assert (caught.value.tensor, caught.value.ranks) == (name, (rank,))
        assert caught.value.step == 2
        with log() as told:
            assert hvd.check_parameters(net, optimizer, repair=True) == [name]
        assert len(told) == (hvd.rank() == 0)
        assert bits_of(places) == before
    assert hvd.check_parameters(net, optimizer) == []


def periodic(steps, **options):
    """A bit flips on the last rank after step 4."""
    net = model()
    optimizer = trained(net, SGD, 4, **options)
    if hvd.rank() == hvd.size() - 1:
        flip(net[2].weight, 77)
    train(net, optimizer, steps)


AT_STEP_6 = f"{CHECK}: after step 6, parameter '2.weight' is not the same on all ranks: "


@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}])
@on_ranks(2, 3, hosts=("1,1",), knobs={CHECK: "3"})
def test_every_n_steps_the_ranks_compare_and_raise_the_same(options):
    with pytest.raises(DifferenceError) as caught:
        periodic(4, **options)
    error = caught.value
    same_on_all_ranks((error.tensor, error.ranks, error.step, str(error)))
    assert error.step == 6
    if options:  # the other ranks' deltas are combined with those of another start
        return
    size = hvd.size()
    assert (error.tensor, error.ranks) == ("2.weight", (2,) if size == 3 else ())
    majority, none = "rank 2 differs from ranks 0, 1, the majority", "no majority, between rank 0;"
    assert str(error).startswith(AT_STEP_6 + (majority if size == 3 else none))
    assert "broadcast_parameters" in str(error)


@on_ranks(knobs={CHECK: "repair:3"})
def test_a_repair_is_told_once_and_training_goes_on():
    with log() as told:
        periodic(8)
    assert len(told) == (hvd.rank() == 0)
    for text in told:
        assert text.startswith(f"{AT_STEP_6}no majority, between rank 0; rank 1 (")
        assert "Repaired: copied from rank 0, the lowest one, where no value has a majority" in text


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("local steps", ["3 steps in a row were made with gradients that are not", "has compared"]),
        ("no optimizer of ours", ["has compared nothing"]),
        ("reduced steps", []),
    ],
)
@on_ranks(knobs={CHECK: "3"})
def test_where_nothing_is_compared_rank_0_says_so(how, words):
    """What the logger is told, the world's end included."""
    hvd.shutdown()
    hvd.init()
    is_first = hvd.rank() == 0
    net = model()
    with log() as told:
        if how == "local steps":
            optimizer = sgd(net.parameters())
            for _ in range(7):
                with optimizer.no_sync():
                    net(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
        elif how == "reduced steps":
            trained(net, steps=2)
        hvd.barrier()
        hvd.shutdown()
    assert len(told) == (len(words) if is_first else 0)
    assert all(map(str.__contains__, told, words))


@pytest.mark.parametrize(
    "options",
    [
        {"shard": True},
        {"shard": "host"},
        {"shard": True, "overlap_forward": True},
        {"op": hvd.Adasum},
        {"free_gradients": True},
        {"backward_passes_per_step": 2},
    ],
)
@on_ranks(knobs={CHECK: "1"})
def test_what_rightly_differs_is_left_out(options):
    """No check raises where ranks rightly differ; a flipped bit is found in every case."""
    net = model()
    if "overlap_forward" in options:
        options["overlap_forward"] = net
    optimizer = trained(net, OPTIMIZERS["Adam"], 0, **options)
    for batch in batches(3, 2, hvd.size()):
        for _ in range(options.get("backward_passes_per_step", 1)):
            loss_of(net, *mine(*batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert hvd.check_parameters(net, optimizer, buffers=True) == []
    if hvd.rank() == hvd.size() - 1:
        flip(net[4].bias, 5)
    with log():
        assert hvd.check_parameters(net, optimizer, repair=True) == ["4.bias"]
    assert hvd.check_parameters(net, optimizer) == []


@on_ranks(4, hosts=("2,2",), knobs={CHECK: "1"})
def test_shared_parameters_of_a_host_are_repaired():
    """The copy of the second host is wrong: both its ranks are."""
    net = model()
    hvd.share_parameters(net)
    optimizer = trained(net, OPTIMIZERS["Adam"])
    before = net[2].weight.detach().clone()
    hvd.barrier()
    if hvd.rank() == 3:
        flip(net[2].weight, 1000)
    hvd.barrier()
    is_one_host = hvd.cross_size() == 1
    with log():
        repaired = hvd.check_parameters(net, optimizer, repair=True)
    assert repaired == ([] if is_one_host else ["2.weight"])
    hvd.barrier()
    assert torch.equal(net[2].weight, before) != is_one_host


@on_ranks(knobs={CHECK: "2"})
def test_a_rank_that_has_joined_is_left_out():
    """Rank 1 has joined when rank 0 checks; after it both do again, at the same steps."""
    net = model()
    optimizer = sgd(net.parameters(), lr=0.1)
    steps = 3 if hvd.rank() else 7
    for epoch in range(2):
        for x, y in batches(steps, 2, 1):
            loss_of(net, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0 and not hvd.rank():
            assert hvd.check_parameters(net, optimizer) == []
        hvd.join()
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    assert hvd.check_parameters(net) == []


@on_ranks(3, knobs={CHECK: "1"})
def test_the_members_of_a_process_set_compare():
    pair = hvd.add_process_set([0, 2])
    if not pair.included():
        return
    net = model()
    optimizer = trained(net, SGD, 0, process_set=pair)
    train(net, optimizer, 3, of=pair)
    assert hvd.check_parameters(net, optimizer, process_set=pair) == []
    optimizer.param_groups[0]["lr"] = 0.5 if hvd.rank() else 0.25
    with pytest.raises(DifferenceError, match="option 'lr of parameter group 0' is not the"):
        hvd.check_parameters(net, optimizer, process_set=pair)
    with log():
        repaired = hvd.check_parameters(net, optimizer, repair=True, process_set=pair)
    assert repaired == ["lr of parameter group 0"]
    assert optimizer.param_groups[0]["lr"] == 0.25


@on_ranks()
def test_wrong_use_is_an_error_on_every_rank():
    rank = hvd.rank()
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def refused(*words, of, **options):
        with pytest.raises((hvd.HorovodInternalError, ValueError)) as caught:
            hvd.check_parameters(*of, **options)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    weights = "'weight' float32[2, 3] on rank 0, parameter '0.weight' float32[2, 3] on rank 1"
    refused("tensor 0 is not the same", weights, of=[net if rank else nn.Linear(3, 2)])
    shapes = "parameter 'a' float32[2] on rank 0, parameter 'a' float32[3] on rank 1"
    refused("tensor 0 is not the same", shapes, of=[[("a", torch.zeros(2 + rank))]])
    missing = "no such tensor on rank 0, parameter 'a' float32[2] on rank 1"
    refused("tensor 1 is not the same", missing, of=[[("a", torch.zeros(2))] * (1 + rank)])
    repairs = "repair=False on rank 0, repair=True on rank 1"
    refused(repairs, of=[[("a", torch.zeros(2))]], repair=bool(rank))
    refused("rank 0 raised" if rank else "expected a module", of=[net if rank else "net"])
    refused("optimizer is int" if rank else "rank 1 raised", of=[net, 3 if rank else None])
    net(torch.randn(4, 3) + rank)
    assert hvd.check_parameters(net) == hvd.check_parameters([]) == []
    name = "buffer '1.running_mean' is not the same"
    refused(name, "convert_sync_batchnorm", of=[net], buffers=True)


@on_ranks()
def test_tensors_of_every_form_are_compared_and_repaired():
    """Each rank's own values become rank 0's, whatever form the tensor has."""
    own_values = float(hvd.rank() + 1)
    tensors = {
        str(dtype): torch.full((5, 3), own_values).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.complex64)
    }
    tensors["float8"] = torch.full((7,), own_values).to(torch.float8_e4m3fn)
    tensors["bool"] = torch.tensor(hvd.rank() == 0)
    tensors["strided"] = torch.full((4, 6), own_values)[::2, ::3]
    tensors["expanded"] = torch.full((1, 3), own_values).expand(4, 3)
    tensors["conj"] = torch.full((3,), own_values * 1j).conj()
    tensors["large"] = torch.full((1 << 20, 3), own_values)
    tensors["empty"] = torch.empty(0, 3)
    tensors["meta"] = torch.empty(3, device="meta")
    with log():
        repaired = hvd.check_parameters(tensors, repair=True)
    assert repaired == sorted(tensors.keys() - {"empty", "meta"})
    assert hvd.check_parameters(tensors) == []
    assert tensors["strided"].unique().tolist() == tensors["expanded"].unique().tolist() == [1.0]
    assert tensors["conj"].tolist() == [-1j] * 3
    assert tensors["bool"].item() is True
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(torch.ones(3) * hvd.rank(), 0.5, 0, torch.qint8)
    with pytest.raises(DifferenceError, match="parameter 'quantized' is not the same"):
        hvd.check_parameters({"quantized": quantized}, repair=True)


@pytest.mark.parametrize("values", [("0", "5"), ("5", "repair:5")])
@on_ranks()
def test_a_variable_that_differs_is_an_error(values):
    rank = hvd.rank()
    hvd.shutdown()
    os.environ[CHECK] = values[rank]
    try:
        hvd.init()
        words = f"{CHECK}={values[0]} on rank 0, {CHECK}={values[1]} on rank 1; give every"
        with pytest.raises(hvd.HorovodInternalError, match=words):
            trained(model())
    finally:
        del os.environ[CHECK]
        hvd.shutdown()  # the next case gets a world with the same variables on all ranks


@on_ranks(1, knobs={CHECK: "1"})
def test_one_rank_alone_is_the_same_as_itself():
    net = model()
    optimizer = trained(net)
    assert hvd.check_parameters(net, optimizer, repair=True) == []
    with pytest.raises(ValueError, match="buffers=True needs a module"):
        hvd.check_parameters(net.state_dict(), buffers=True)
    loss_of(net, torch.ones(1, 6, dtype=torch.float64), torch.ones(1, 1)).backward()
    hvd.shutdown()
    optimizer.step()


@on_ranks(2, 3)
def test_state_that_some_ranks_lack_is_named():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    if hvd.rank() == 1:
        for param in net.parameters():
            state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(param)}
            optimizer.state[param] = {**state, "exp_avg_sq": torch.zeros_like(param)}
    with pytest.raises(DifferenceError) as caught:
        hvd.check_parameters(net, optimizer, repair=True)
    text = same_on_all_ranks(str(caught.value))
    lacking = "rank 0" if hvd.size() == 2 else "ranks 0, 2"
    where = f"is there on rank 1, but not on {lacking}"
    assert f"state 'exp_avg of weight' float32[2, 2] {where}" in text
    assert "broadcast_optimizer_state" in text
    found = (caught.value.tensor, caught.value.ranks)
    assert found == ("exp_avg of weight", () if hvd.size() == 2 else (1,))


@on_ranks()
def test_an_option_may_be_an_integer_on_one_rank():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    (group,) = optimizer.param_groups
    group["lr"] = (1.0, 1)[hvd.rank()]
    assert hvd.check_parameters(net, optimizer) == []
    group["lr"] = (0.25, 1)[hvd.rank()]
    with log():
        repaired = hvd.check_parameters(net, optimizer, repair=True)
    assert (repaired, group["lr"]) == (["lr of parameter group 0"], 0.25)


def test_the_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(DifferenceError("text", "w", (1, 2), 3)))
    assert (str(error), error.tensor, error.ranks, error.step) == ("text", "w", (1, 2), 3)
