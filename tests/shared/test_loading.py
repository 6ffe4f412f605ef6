"""load_state_dict of a model with shared parameters."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.observing.reports import FAILS

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.hosts("2,1"),
    pytest.mark.wide_in(1, 3, "mpich"),
]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)))


def lowest_local():
    return hvd.rank() - hvd.local_rank()


def shared_net():
    hvd.init()
    model = net()
    hvd.share_parameters(model)
    return model


def values(model, value):
    return {name: torch.full_like(p, value) for name, p in model.state_dict().items()}


def loads():
    model = shared_net()
    wrong = []
    for part in (model, nn.Sequential(model), model[1]):
        # The ranks of a host have different values: those of its lowest rank count.
        found = part.load_state_dict(values(part, 5.0 + hvd.rank()))
        expected = 5.0 + lowest_local()
        wrong += [n for n, p in part.named_parameters() if not p.eq(expected).all()]
        wrong += [n for n, p in part.named_parameters() if not hvd.is_shared(p)]
        assert not found.missing_keys
        hvd.barrier()
    assert not wrong


def test_the_values_of_the_lowest_rank_are_written(world):
    world.run(loads)


def writes_once():
    """The other ranks of a host write nothing: not even the same values."""
    model = shared_net()
    wanted = values(model, 5.0 if hvd.local_rank() == 0 else float("nan"))
    pages = [p.detach() for p in model.parameters()]
    model.load_state_dict(wanted)
    assert all(p.eq(5.0).all() for p in pages)


def test_the_other_ranks_write_nothing(world):
    world.run(writes_once)


def errors():
    model = shared_net()
    before = [p.clone() for p in model.parameters()]
    last = hvd.rank() == hvd.size() - 1
    good = values(model, 2.0)
    bad = {**good, "0.bias": torch.zeros(7)}
    wrong = []
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        model.load_state_dict(bad if last else good)
    more = {**good, "x": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"['\"]x['\"]") as caught:
        model.load_state_dict(more if last else good)
    if hvd.size() > 1 and "other keys" not in str(caught.value):
        wrong.append(str(caught.value))
    del more["0.weight"]
    found = model.load_state_dict(more, strict=False)
    if found.missing_keys != ["0.weight"] or found.unexpected_keys != ["x"]:
        wrong.append(found)
    with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\)"):
        model.load_state_dict(good, assign=True)
    model.load_state_dict(values(model, 3.0))
    assert model[0].weight.eq(3.0).all()
    assert not wrong
    assert len(before) == 6


def test_an_error_on_one_rank_is_one_on_all_and_the_next_load_works(world):
    world.run(errors)


def copies():
    model = shared_net()
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert len(file.getvalue()) < 10_000
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    thawed = pickle.loads(pickle.dumps(model))
    assert not any(map(hvd.is_shared, [*twin.parameters(), *thawed.parameters()]))
    if hvd.rank() == 0:
        # Copies are ordinary: no other rank is needed.
        twin.load_state_dict(values(twin, 1.0 + hvd.rank()))
        thawed.load_state_dict(values(twin, 4.0))
        assert twin[0].weight.eq(1).all()
    assert not model[0].weight.eq(1).all()


def test_copies_and_checkpoints_are_ordinary(world):
    world.run(copies)


def load_checked():
    model = shared_net()
    model.load_state_dict(values(model, 1.0))
    model.load_state_dict(values(model, 2.0))
    with torch.no_grad():
        if hvd.rank() == hvd.size() - 1:
            model[1][0].weight.mul_(2)
    text = rf"load_state_dict: .*'1.0.weight' was changed in place by rank {hvd.size() - 1},"
    with pytest.raises(hvd.HorovodInternalError, match=text):
        model.load_state_dict(values(model, 3.0))


def test_a_change_in_place_is_found(world):
    world.run(load_checked, knobs={"HVDLITE_CHECK_SHARED": "1"})


def one_rank_alone():
    model = shared_net()
    wanted = values(model, 1.0)

    def broadcast(state_dict):
        hvd.broadcast_parameters(state_dict, 0)

    call = model.load_state_dict if hvd.rank() == 0 else broadcast
    with pytest.raises(hvd.HorovodInternalError, match="shared parameters: on every rank") as error:
        call(wanted)
    assert ("load them before share_parameters" in str(error.value)) == (hvd.rank() == 0)
    hvd.shutdown()  # the ranks have called different operations


@pytest.mark.ranks(2)
def test_a_rank_that_loads_alone_is_told_that_all_must(world):
    world.run(one_rank_alone, knobs=FAILS)
