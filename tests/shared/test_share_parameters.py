"""share_parameters: one copy of a model per host."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hvdlite as hvd
from hvdlite.shared import place_of, require_shared, verify, writing

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.hosts("2,1", "2,2"),
    pytest.mark.wide_in(1, 3, "2,2", "mpich"),
]


class Structured(nn.Module):
    """Tied weights, views of one storage, and every kind of strides."""

    def __init__(self, rank):
        super().__init__()
        flat = torch.arange(24.0) + 100 * rank
        self.left = nn.Parameter(flat[:12].view(3, 4))
        self.right = nn.Parameter(flat[8:].view(4, 4))  # overlaps with the other
        self.transposed = nn.Parameter((torch.arange(6.0) + 100 * rank).view(2, 3).t())
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.encoder = nn.Embedding(5, 4)
        self.decoder = nn.Linear(4, 5)
        self.decoder.weight = self.encoder.weight
        self.narrow = nn.Parameter(torch.full((3,), float(rank), dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(float(rank)))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.tensor([rank, 7]), requires_grad=False)
        self.register_buffer("table", torch.arange(5) + rank)


def keeps_its_structure():
    hvd.init()
    rank = hvd.rank()
    lowest = rank - hvd.local_rank()
    torch.manual_seed(lowest)
    expected = Structured(lowest)
    torch.manual_seed(rank)
    model = Structured(rank)
    before = dict(model.named_parameters())
    strides = {name: p.stride() for name, p in before.items()}
    model.scalar.grad = torch.tensor(5.0)
    hvd.share_parameters(model)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert {name: p.stride() for name, p in after.items()} == strides
    assert model.scalar.grad == 5
    assert model.decoder.weight is model.encoder.weight
    assert model.right.data_ptr() - model.left.data_ptr() == 8 * 4
    assert all(map(hvd.is_shared, after.values()))
    assert hvd.is_shared(model.conv.weight[1])
    assert not hvd.is_shared(model.table)
    assert not hvd.is_shared(torch.ones(3))
    for name, value in expected.named_parameters():
        assert torch.equal(after[name], value), name
    assert model.frozen.requires_grad is False
    assert model.left.data_ptr() % 64 == 0


def test_values_are_the_lowest_local_ranks_and_objects_strides_and_ties_stay(world):
    world.run(keeps_its_structure)


def one_rank_writes():
    hvd.init()
    model = nn.Linear(3, 2)
    hvd.share_parameters(model)
    hvd.barrier()
    if hvd.local_rank() == hvd.local_size() - 1:
        with torch.no_grad():
            model.weight.fill_(hvd.rank())
    hvd.barrier()
    highest = hvd.rank() - hvd.local_rank() + hvd.local_size() - 1
    assert model.weight.eq(highest).all()


def test_all_ranks_of_a_host_see_the_same_pages(world):
    world.run(one_rank_writes)


def works_again():
    hvd.init()
    model = nn.Linear(3, 2)
    hvd.share_parameters(model)
    address = model.weight.data_ptr()
    grown = nn.Sequential(model, nn.Linear(2, 2))
    hvd.share_parameters(grown)
    assert model.weight.data_ptr() == address
    assert hvd.is_shared(grown[1].weight)
    named = list(grown.named_parameters())
    require_shared(named)
    model.to(torch.float64)
    assert not hvd.is_shared(model.weight)
    text = r"parameter '0\.weight' was placed into shared memory .* and rank \d .* call hvd\.share"
    with pytest.raises(RuntimeError, match=text):
        require_shared(named)
    hvd.share_parameters(grown)
    require_shared(named)
    assert model.weight.dtype == torch.float64
    # Where one rank has ended the sharing, the tensor gets a new place on all.
    if hvd.rank() == hvd.size() - 1:
        model.bias.data = model.bias.data.clone()
    hvd.share_parameters(grown)
    assert hvd.is_shared(model.bias)
    places = hvd.allgather_object(place_of(model.bias))
    lowest = hvd.rank() - hvd.local_rank()
    assert len(set(places[lowest : lowest + hvd.local_size()])) == 1
    model.share_memory()
    assert not hvd.is_shared(model.bias)


def test_what_is_shared_stays_and_what_is_not_any_more_is_shared_anew(world):
    world.run(works_again)


class Fancy(nn.Module):
    def __init__(self, parameter):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.odd = parameter


def refused():
    hvd.init()
    inference = torch.inference_mode()
    with inference:
        inferred = nn.Parameter(torch.ones(2), requires_grad=False)
    cases = [
        (nn.Parameter(torch.ones(2, 2).to_sparse()), "odd.*expected a dense one"),
        (nn.Parameter(torch.ones(2, device="meta")), "'odd' is on the device meta"),
        (nn.UninitializedParameter(), "'odd' is not initialized yet"),
        (nn.Parameter(torch.ones(2, dtype=torch.complex64).conj()), "'odd' is a lazily conj"),
        (inferred, "'odd' was made in inference_mode"),
    ]
    for parameter, text in cases:
        model = Fancy(parameter)
        with pytest.raises(ValueError, match=f"share_parameters: parameter .*{text}"):
            hvd.share_parameters(model)
        assert not hvd.is_shared(model.inner.weight)
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module, got list"):
        hvd.share_parameters([])


@pytest.mark.wide_in("2,1")
def test_a_parameter_that_is_not_ordinary_is_refused_by_name(world):
    world.run(refused)


def differ():
    hvd.init()
    odd = hvd.rank() == hvd.size() - 1
    models = [
        (nn.Linear(3 if odd else 2, 1), r"parameter 'weight' differs: float32\[1, 2\] on rank"),
        (nn.Linear(2, 1, dtype=torch.float64 if odd else None), r"float64\[1, 2\] on rank"),
        (nn.Linear(2, 1, bias=not odd), r"parameter 'bias' differs: .*nothing there on rank"),
        (
            Fancy(nn.Parameter(torch.ones(2, 2).t() if odd else torch.ones(2, 2))),
            r"parameter 'odd' differs: .* with strides \[1, 2\] on rank",
        ),
    ]
    if hvd.size() == 1:
        return
    for model, text in models:
        with pytest.raises(hvd.HorovodInternalError, match=f"share_parameters: .*{text}"):
            hvd.share_parameters(model)
        assert not any(map(hvd.is_shared, model.parameters()))
    model = nn.Linear(2, 1) if not odd else 3
    error = ValueError if odd else hvd.HorovodInternalError
    with pytest.raises(error, match="expected a"):
        hvd.share_parameters(model)


@pytest.mark.wide_in("2,1")
def test_models_that_differ_are_an_error_on_every_rank(world):
    world.run(differ)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("absent", None)
        self.register_buffer("hidden", torch.arange(3), persistent=False)


def buffers():
    hvd.init()
    model = nn.Sequential(Table(), nn.BatchNorm1d(3, track_running_stats=False))
    hvd.share_parameters(model, buffers=True)
    assert hvd.is_shared(model[0].table)
    assert hvd.is_shared(model[0].hidden)
    hvd.barrier()
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.spectral_norm(nn.Linear(2, 2))
    for layer, name in (
        (nn.BatchNorm1d(2), "running_mean"),
        (nn.InstanceNorm1d(2, track_running_stats=True), "running_mean"),
        (hvd.SyncBatchNorm(2), "running_mean"),
        (normed, "parametrizations.weight.0._u"),
        (old, "weight_u"),
    ):
        text = rf"buffer '1\.{re.escape(name)}' is changed by forward: .* Use buffers=False"
        with pytest.raises(ValueError, match=text):
            hvd.share_parameters(nn.Sequential(Table(), layer), buffers=True)
        hvd.share_parameters(nn.Sequential(Table(), layer))


@pytest.mark.wide_in("2,1")
def test_buffers_are_shared_on_demand_but_not_those_that_forward_changes(world):
    world.run(buffers)


class Items:
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.model.weight.detach().sum()


def in_workers(method):
    hvd.init()
    model = nn.Linear(2, 2)
    hvd.share_parameters(model)
    address = model.weight.data_ptr()
    loader = DataLoader(Items(model), None, num_workers=1, multiprocessing_context=method)
    hvd.barrier()
    if hvd.local_rank() == 0:
        with torch.no_grad():
            model.weight.fill_(3)
    hvd.barrier()
    assert [float(item) for item in loader] == [12.0, 12.0]
    assert model.weight.data_ptr() == address


@pytest.mark.wide_in("2,1")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.wide)])
def test_a_data_loaders_workers_have_the_same_parameters(world, method):
    world.run(in_workers, method)


def compiled():
    hvd.init()
    model = nn.Linear(3, 2)
    function = torch.compile(model, backend="aot_eager")
    x = torch.ones(4, 3)
    with torch.no_grad():
        function(x)
        hvd.share_parameters(model)
        hvd.barrier()
        model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()})
        assert function(x).eq(4).all()
        assert torch.compile(model, backend="aot_eager")(x).eq(4).all()


@pytest.mark.wide_in("2,1")
def test_a_compiled_model_sees_the_shared_parameters(world):
    world.run(compiled)


def checked(how):
    hvd.init()
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.ones(2))
    hvd.share_parameters(model, buffers=True)
    last = hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), 0)
    with writing("step"):
        if hvd.local_rank() == 0:
            with torch.no_grad():
                model.weight.add_(1)
    verify("step")
    if how == "one rank" and hvd.rank() == last:
        with torch.no_grad():
            model.weight.add_(1)
    if how == "all ranks":
        with torch.no_grad():
            model.weight.zero_()
    if how == "numpy" and hvd.local_rank() == 0:
        model.weight.detach().numpy()[:] = 7
    if how == "buffer":
        model.mask.add_(1)
    everyone = f"by ranks? {', '.join(map(str, range(hvd.size())))},"
    what = "buffer 'mask'" if how == "buffer" else "parameter 'weight'"
    who = {
        "buffer": everyone,
        "one rank": f"by rank {last},",
        "all ranks": everyone,
        "numpy": "by some rank, not through",
    }[how]
    text = f"step: HVDLITE_CHECK_SHARED found that shared {what} .* in place {who}"
    with pytest.raises(hvd.HorovodInternalError, match=text), writing("step"):
        raise AssertionError("not reached")


@pytest.mark.wide_in("2,1")
@pytest.mark.parametrize("how", ["one rank", "all ranks", "numpy", "buffer"])
def test_the_check_names_what_was_changed_and_by_whom(world, how):
    world.run(checked, how, knobs={"HVDLITE_CHECK_SHARED": "1"})
