"""State dicts as trees: copies of them, and their tensors apart from the rest."""

from collections import Counter, OrderedDict

import numpy
import pytest
import torch

from hvdlite.recipes.state_trees import Copier, places_of, with_tensors, without_tensors


def tree_of(value):
    weight = torch.full((2, 3), value)
    return {
        "model": OrderedDict(weight=weight, tied=weight, other=torch.full((2, 3), -value)),
        "groups": [{"lr": numpy.float64(0.5), "betas": (0.9, 0.99), "on": True}],
        "empty": (torch.empty(0), torch.Size([2])),
        3: torch.full((4, 4), value).t()[::2],
    }


def same(one, other):
    if not isinstance(one, float) and type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_copy_is_equal_and_independent_and_tied_tensors_stay_tied():
    tree = tree_of(1.0)
    copied = Copier().copy(tree)
    assert same(copied, tree)
    tree["model"]["weight"].zero_()
    assert same(copied, tree_of(1.0))
    assert copied["model"]["weight"] is copied["model"]["tied"]
    assert type(copied["groups"][0]["lr"]) is float


def test_the_next_copy_has_the_same_memory():
    copier = Copier()
    first = copier.copy(tree_of(1.0))
    addresses = [tensor.data_ptr() for tensor in without_tensors(first)[1]]
    second = copier.copy(tree_of(2.0))
    assert same(second, tree_of(2.0))
    assert [tensor.data_ptr() for tensor in without_tensors(second)[1]] == addresses


def test_tensors_that_are_no_longer_tied_do_not_share_the_memory_of_the_copy_before():
    copier = Copier()
    tree = tree_of(1.0)
    copier.copy(tree)
    tree["model"]["tied"] = torch.full((2, 3), 5.0)
    assert same(copier.copy(tree), tree)


def test_a_copy_of_another_form_is_made_anew():
    copier = Copier()
    copier.copy({"a": torch.ones(3), "b": [torch.ones(2)]})
    for tree in ({"a": torch.ones(4), "b": ()}, {"a": torch.ones(4).int(), "c": 1}, [1]):
        assert same(copier.copy(tree), tree)


def test_a_modules_versions_are_copied():
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert Copier().copy(state)._metadata == state._metadata


def test_tensors_are_taken_out_once_each_and_put_in_again():
    tree = {**tree_of(1.0), "sparse": torch.eye(2).to_sparse()}
    frame, tensors = without_tensors(tree)
    assert len(tensors) == 4
    places = places_of(frame)
    for place, tensor in zip(places, tensors, strict=True):
        assert (place.shape, place.stride()) == (tensor.shape, tensor.stride())
        place.copy_(tensor)
    back = with_tensors(frame, places)
    assert torch.equal(back.pop("sparse").to_dense(), tree.pop("sparse").to_dense())
    assert same(back, tree)
    assert back["model"]["weight"] is back["model"]["tied"]


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (numpy.arange(3), r"progress\['best'\]\[1\] is a numpy.ndarray, which torch.load"),
        (lambda: None, "builtins.function"),
    ],
)
def test_what_could_not_be_read_again_is_refused_by_its_name(thing, text):
    with pytest.raises(ValueError, match=text):
        Copier().copy({"progress": {"best": [1, thing]}})


def test_what_torch_reads_safely_is_copied_too():
    tree = {"counted": Counter("aab"), "dtype": torch.bfloat16, "set": {1, 2}}
    assert Copier().copy(tree) == tree
