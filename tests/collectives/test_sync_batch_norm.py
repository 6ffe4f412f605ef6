"""SyncBatchNorm against torch's BatchNorm in one process that has the whole batch."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hvdlite as hvd

FEATURES = 3


def batch(rank, step, rows, tail, dtype):
    """Far from zero, where sums of squares would cancel; other values on every rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, FEATURES, *tail, generator=generator, dtype=torch.float64)
    return (
        x * (1 + rank) + 100 + 10 * rank + torch.arange(FEATURES).view(-1, *[1] * len(tail))
    ).to(dtype)


def weights(like):
    """For the loss: not constant, else every gradient through a normalization is zero."""
    return torch.cos(torch.arange(like.numel(), dtype=torch.float64)).reshape(like.shape)


def matches(got, wanted, dtype, what):
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-3}.get(dtype, 3e-2)
    torch.testing.assert_close(
        got.double(), wanted.double(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def trains(dtype, options, tail, rows_of):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    rows = [rows_of[r % len(rows_of)] for r in range(size)]
    # The expected result: one process, in float64, on the ranks' values in their dtype.
    torch.manual_seed(7)
    layer = hvd.SyncBatchNorm(FEATURES, dtype=dtype, **options)
    whole = nn.BatchNorm3d(FEATURES, dtype=torch.float64, **options)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, 1.5, -1.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, -2.0]))
            whole.weight.copy_(layer.weight)
            whole.bias.copy_(layer.bias)
    for step in range(3):
        parts = [batch(r, step, rows[r], tail, dtype) for r in range(size)]
        joined = torch.cat(parts).double().requires_grad_()
        flat = joined.reshape(len(joined), FEATURES, -1, 1, 1)
        wanted = whole(flat).reshape(joined.shape)
        coefficients = weights(wanted)
        (wanted * coefficients).sum().backward()
        x = parts[rank].requires_grad_()
        got = layer(x)
        assert got.dtype is dtype
        assert got.shape == x.shape
        mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        matches(got, wanted[mine], dtype, "output")
        (got * coefficients[mine].to(dtype)).sum().backward()
        matches(x.grad, joined.grad[mine], dtype, "gradient of the input")
    if layer.affine:
        # Each rank has its part of these; a distributed optimizer adds them up.
        for mine, wanted in ((layer.weight, whole.weight), (layer.bias, whole.bias)):
            assert mine.grad.dtype is dtype
            total = hvd.allreduce(mine.grad.double(), op=hvd.Sum)
            scale = wanted.grad.abs().max().clamp(min=1)
            matches(total / scale, wanted.grad / scale, dtype, "gradient of a parameter")
    if layer.track_running_stats:
        assert layer.num_batches_tracked == 3
        matches(layer.running_mean, whole.running_mean, dtype, "running mean")
        matches(layer.running_var, whole.running_var, dtype, "running variance")
    # In eval mode nothing is sent: the ranks may run it differently often.
    layer.eval()
    whole.eval()
    if layer.track_running_stats:
        for _ in range(rank):
            joined = batch(rank, 9, 4, tail, dtype)
            wanted = whole(joined.double().reshape(4, FEATURES, -1, 1, 1)).reshape(joined.shape)
            matches(layer(joined), wanted, dtype, "eval")
        assert layer.num_batches_tracked == 3


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize(
    ("dtype", "options", "tail", "rows_of"),
    [
        (torch.float32, {}, (4, 3), (5,)),
        (torch.float64, {"momentum": None}, (), (2, 7, 3)),
        (torch.float64, {"affine": False, "eps": 1e-3}, (2,), (1, 4)),
        (torch.float64, {"track_running_stats": False}, (2, 1, 2), (3, 2)),
        (torch.float64, {}, (3,), (4, 0, 2)),
    ],
    ids=["float32", "no momentum", "not affine", "no statistics", "an empty batch"],
)
def test_it_is_batch_norm_over_the_batches_of_all_ranks(world, dtype, options, tail, rows_of):
    world.run(trains, dtype, options, tail, rows_of)


# Of one rank torch's own layer does it all, whose sums are in the narrow type on CPUs.
@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_narrow_types_are_in_float32(world, dtype):
    world.run(trains, dtype, {"track_running_stats": False}, (4, 3), (5, 3))


def of_a_set():
    hvd.shutdown()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    process_set = hvd.add_process_set(range(1, size))
    layer = nn.BatchNorm1d(FEATURES, dtype=torch.float64)
    layer = hvd.convert_sync_batchnorm(nn.Sequential(layer), process_set)[0]
    assert copy.deepcopy(layer).process_set is process_set
    assert pickle.loads(pickle.dumps(layer)).num_features == FEATURES
    if rank:
        parts = [batch(r, 0, 4, (), torch.float64) for r in range(1, size)]
        wanted = nn.BatchNorm1d(FEATURES, dtype=torch.float64)(torch.cat(parts))
        matches(layer(parts[rank - 1]), wanted.split(4)[rank - 1], torch.float64, "set")
    else:
        with pytest.raises(ValueError, match="SyncBatchNorm: rank 0 is not a member"):
            layer(batch(0, 0, 4, (), torch.float64))
    hvd.remove_process_set(process_set)


@pytest.mark.ranks(3)
@pytest.mark.mpis("mpich")
def test_it_works_in_a_process_set(world):
    world.run(of_a_set)


def refuses():
    hvd.init()
    layer = hvd.SyncBatchNorm(FEATURES)
    for shape in ((FEATURES,), (2, FEATURES + 1), (2, 4, FEATURES)):
        with pytest.raises(ValueError, match=r"expected an input of shape \(batch, 3, ...\)"):
            layer(torch.ones(shape))
    with pytest.raises(ValueError, match=r"expected floating-point numbers, got torch\.int64"):
        layer(torch.ones(2, FEATURES, dtype=torch.int64))
    # One value for each feature in all: on every rank.
    with pytest.raises(ValueError, match=r"more than (one|1) value"):
        layer(torch.ones(int(hvd.rank() == 0), FEATURES))
    assert layer.num_batches_tracked <= 1
    # None at all.
    if hvd.size() > 1:
        empty = torch.ones(0, FEATURES, 2, requires_grad=True)
        layer(empty).sum().backward()
        assert empty.grad.shape == empty.shape
        assert layer.running_mean.tolist() == [0.0] * FEATURES
        other = hvd.SyncBatchNorm(FEATURES + hvd.rank())
        with pytest.raises(hvd.HorovodInternalError):
            other(torch.ones(2, FEATURES + hvd.rank()))
    # No gradient of the input is needed on any rank: that of the parameters is there.
    layer(batch(hvd.rank(), 0, 2, (), torch.float32)).square().sum().backward()
    assert layer.bias.grad is not None
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


@pytest.mark.ranks(1, 2)
@pytest.mark.mpis("openmpi")
def test_inputs_that_do_not_fit_are_value_errors(world):
    world.run(refuses)


def test_converting_keeps_all_but_the_class_of_batch_norms():
    shared = nn.BatchNorm2d(4, eps=1e-3, momentum=0.3)
    model = nn.ModuleDict(
        {
            "first": nn.Sequential(nn.Conv2d(1, 4, 1), shared, nn.ReLU()),
            "again": shared,
            "deep": nn.ModuleList([nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Dropout())]),
            "bare": nn.BatchNorm3d(3, track_running_stats=False, momentum=None),
            "others": nn.ModuleList([nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.LayerNorm(2)]),
            "torchs": nn.SyncBatchNorm(2),
            "ours": hvd.SyncBatchNorm(2),
        }
    )
    shared.weight.requires_grad_(False)
    shared.weight.data.fill_(3.0)
    shared.eval()
    names = list(model.state_dict())
    before = dict(model.named_parameters()), dict(model.named_buffers())
    others = [m for m in model.modules() if not isinstance(m, nn.modules.batchnorm._BatchNorm)]
    ours = model["ours"]
    converted = hvd.convert_sync_batchnorm(model)
    assert converted is model
    assert list(model.state_dict()) == names
    assert all(value is before[0][name] for name, value in model.named_parameters())
    assert all(value is before[1][name] for name, value in model.named_buffers())
    kept = list(map(id, model.modules()))
    assert all(id(module) in kept for module in others)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert {type(norm) for norm in norms} == {hvd.SyncBatchNorm}
    assert len(norms) == 5
    assert model["again"] is model["first"][1]
    assert model["ours"] is ours
    new = model["again"]
    assert (new.num_features, new.eps, new.momentum, new.training) == (4, 1e-3, 0.3, False)
    assert not new.weight.requires_grad
    assert model["deep"][0][0].training
    assert model["deep"][0][0].weight is None
    assert model["bare"].running_mean is None
    assert model["bare"].momentum is None
    alone = nn.BatchNorm1d(2)
    result = hvd.convert_sync_batchnorm(alone)
    assert type(result) is hvd.SyncBatchNorm
    assert result.weight is alone.weight
    linear = nn.Linear(1, 1)
    assert hvd.convert_sync_batchnorm(linear) is linear
    with pytest.raises(ValueError, match="does not know its number of features yet"):
        hvd.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))
    with torch.device("meta"):
        assert hvd.convert_sync_batchnorm(nn.BatchNorm1d(2)).weight.is_meta


def test_in_eval_mode_it_needs_no_world():
    hvd.shutdown()
    layer = hvd.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="init"):
        layer(torch.ones(3, 2))
    assert layer.eval()(torch.ones(3, 2)).shape == (3, 2)
