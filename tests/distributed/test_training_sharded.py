"""FullyShardedDataParallel (FSDP1) and distributed checkpoints."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)

from tests.distributed.training import in_a_group, mean, sgd, step
from tests.optimizer.models import assert_same_parameters, batches, model, own

STEPS = 6


def fsdp1(net, strategy, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        return FullyShardedDataParallel(
            net,
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            **options,
        )


@in_a_group
def trains_with_fsdp1(rank, size, strategy):
    alone, net = model(), fsdp1(model(), strategy)
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size):
        wanted = step(alone, reference, x, y)
        loss = mean(step(net, optimizer, own(x, rank, size), own(y, rank, size)))
        torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-12)
    with FullyShardedDataParallel.summon_full_params(net):
        assert_same_parameters(net, alone)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        whole = net.state_dict()
    torch.testing.assert_close(dict(whole), dict(alone.state_dict()), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
    ids=lambda strategy: strategy.name,
)
def test_fsdp1_trains_as_one_process(world, tmp_path, strategy):
    world.run(trains_with_fsdp1, tmp_path, strategy)


@in_a_group
def trains_hybrid(rank, size, strategy):
    """Two copies of the model, each of which two ranks share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone, net = model(), fsdp1(model(), strategy, device_mesh=mesh)
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size):
        step(alone, reference, x, y)
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    with FullyShardedDataParallel.summon_full_params(net):
        assert_same_parameters(net, alone)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2],
    ids=lambda strategy: strategy.name,
)
def test_fsdp1_trains_copies_that_pairs_of_ranks_share(world, tmp_path, strategy):
    world.run(trains_hybrid, tmp_path, strategy)


@in_a_group
def goes_on_from_fsdp1_state_dicts(rank, size):
    """A second model that is loaded half way trains on as the first does."""
    data = list(batches(2 * STEPS, 4, size))

    def made():
        net = fsdp1(model(), ShardingStrategy.FULL_SHARD)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated
            FullyShardedDataParallel.set_state_dict_type(net, StateDictType.SHARDED_STATE_DICT)
        return net, torch.optim.Adam(net.parameters(), lr=0.01)

    net, optimizer = made()
    for x, y in data[:STEPS]:
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    other, others = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, as ShardedTensor
        weights = copy.deepcopy(net.state_dict())
        moments = copy.deepcopy(FullyShardedDataParallel.optim_state_dict(net, optimizer))
        other.load_state_dict(weights)
        others.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(other, others, moments)
        )
    for x, y in data[STEPS:]:
        for trained in ((net, optimizer), (other, others)):
            step(*trained, own(x, rank, size), own(y, rank, size))
    with (
        FullyShardedDataParallel.summon_full_params(net),
        FullyShardedDataParallel.summon_full_params(other),
    ):
        assert_same_parameters(other, net, rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_fsdp1_goes_on_from_state_dicts(world, tmp_path):
    world.run(goes_on_from_fsdp1_state_dicts, tmp_path)


@in_a_group
def reduces_in_bf16(rank, size):
    precision = MixedPrecision(reduce_dtype=torch.bfloat16)
    alone = model(torch.float32)
    net = fsdp1(model(torch.float32), ShardingStrategy.FULL_SHARD, mixed_precision=precision)
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size, torch.float32):
        step(alone, reference, x, y)
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    with FullyShardedDataParallel.summon_full_params(net):
        assert_same_parameters(net, alone, rtol=0.1, atol=0.02)
        pairs = zip(net.parameters(), alone.parameters(), strict=True)
        assert not all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.ranks(2)
def test_fsdp1_reduces_in_lower_precision(world, tmp_path):
    world.run(reduces_in_bf16, tmp_path)


def trained(rank, size, seed):
    net = fully_shard(model())
    optimizer = sgd(net)
    for x, y in list(batches(seed + 1, 4, size))[seed:]:
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    return net


@in_a_group
def writes_and_reads(rank, size, folder, later):
    """The ranks write their parts, and another model reads them; `later`: while the first one is
    trained on."""
    net, other = trained(rank, size, 0), trained(rank, size, 1)
    wanted = [parameter.full_tensor() for parameter in net.parameters()]
    state = {"model": get_model_state_dict(net)}
    if later:
        saving = dcp.async_save(state, checkpoint_id=folder)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        saving.result()
        dist.barrier()
    else:
        dcp.save(state, checkpoint_id=folder)
    read = {"model": get_model_state_dict(other)}
    dcp.load(read, checkpoint_id=folder)
    set_model_state_dict(other, read["model"])
    for parameter, whole in zip(other.parameters(), wanted, strict=True):
        assert torch.equal(parameter.full_tensor(), whole)
    return [whole.tolist() for whole in wanted]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("later", [False, True], ids=["at once", "in the background"])
def test_what_ranks_have_written_ranks_and_one_process_read(world, tmp_path, later):
    folder = tmp_path / "checkpoint"
    wanted = world.run(writes_and_reads, tmp_path, folder, later)[0]
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    alone = model()
    alone.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["model"])
    assert [parameter.tolist() for parameter in alone.parameters()] == wanted
