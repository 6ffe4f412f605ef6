"""Shards of an optimizer's state: cut, united, cut anew; marked, checked and loaded."""

import copy
import dataclasses
import functools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.optimizer.sharding.division import Part
from hvdlite.optimizer.sharding.pieces import Whole, part_of_state, recut, same, shaped_state
from hvdlite.optimizer.sharding.state_dicts import MARK, loaded, shard_state_dict
from tests.optimizer.sharding import cuts
from tests.optimizer.sharding.cuts import assert_same_state
from tests.optimizer.sharding.models import OPTIMIZERS


def make(name, params):
    kind, options = OPTIMIZERS[name]
    return kind(params, **options)


@settings(max_examples=50)
@given(st.data(), cuts.shapes, st.sampled_from(list(OPTIMIZERS)))
def test_a_cut_made_anew_from_shards_is_that_made_from_the_whole(data, shapes, kind):
    params = cuts.params_of(shapes, data.draw(st.sets(st.integers(0, len(shapes) - 1))))
    wholes = cuts.wholes_of(params)
    full = cuts.trained(params, functools.partial(make, kind)).state_dict()
    shards = cuts.shards_of(full, data.draw(cuts.cuts(wholes)), wholes)
    # As if the parameters of the second training had another memory format.
    transposed = data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    wholes = cuts.wholes_of(cuts.params_of(shapes, transposed))
    order = data.draw(st.permutations(shards))
    for own in cuts.shardings(wholes, data.draw(cuts.cuts(wholes))):
        (_, groups, found), (_, options, expected) = loaded(order, own), loaded(full, own)
        assert_same_state(dict(enumerate(found)), dict(enumerate(expected)))
        assert groups == options


@settings(max_examples=50)
@given(st.data(), cuts.shapes)
def test_a_rank_needs_only_the_shards_that_have_its_elements(data, shapes):
    params = cuts.params_of(shapes)
    wholes = cuts.wholes_of(params)
    full = cuts.trained(params, torch.optim.Adam).state_dict()
    before = data.draw(cuts.cuts(wholes))
    shards = cuts.shards_of(full, before, wholes)
    left_out = data.draw(st.integers(0, len(shards) - 1))
    rest = shards[:left_out] + shards[left_out + 1 :]
    for own in cuts.shardings(wholes, data.draw(cuts.cuts(wholes))):
        needs = any(
            each.index == part.index and each.begin < part.end and part.begin < each.end
            for each in before[left_out]
            for part in own.division.own
        )
        if needs and rest:
            with pytest.raises(ValueError, match=f"of {len(before)}, and owner {left_out} has"):
                loaded(rest, own)
        elif rest:
            assert same(loaded(rest, own)[2], loaded(full, own)[2])


def test_the_elements_of_a_part_are_counted_in_the_order_of_memory():
    param = torch.zeros(2, 3).t()  # shape [3, 2], memory [2, 3]
    state = {"buffer": torch.arange(6.0).reshape(2, 3).t(), "step": torch.tensor(4.0)}
    whole = Whole.of("w", param)
    part = part_of_state(state, whole, 1, 4)
    assert part["buffer"].tolist() == [1.0, 2.0, 3.0]
    assert part["step"].shape == ()
    contiguous = {**state, "buffer": state["buffer"].contiguous()}
    assert same(part_of_state(contiguous, whole, 1, 4), part)


def test_a_part_of_one_element_does_not_make_a_number_of_a_tensor():
    whole = Whole("w", (3,), (1,))
    count = torch.tensor([7.0])
    pieces = [
        (Part(0, 0, 1), {"buffer": torch.tensor([1.0]), "count": count}),
        (Part(0, 1, 3), {"buffer": torch.tensor([2.0, 3.0]), "count": count}),
    ]
    state = shaped_state(recut(pieces, whole, 0, 3), whole)
    assert state["buffer"].tolist() == [1.0, 2.0, 3.0]
    assert state["count"].tolist() == [7.0]


def test_parts_of_different_steps_do_not_unite():
    whole = Whole("w", (4,), (1,))
    pieces = [
        (Part(0, 0, 2), {"step": torch.tensor(3.0)}),
        (Part(0, 2, 4), {"step": torch.tensor(4.0)}),
    ]
    words = (
        "the state 'step' of 'w' is 3.0 for the elements 0 to 1, but 4.0 for 2 to 3: these states "
        "were not saved in the same step"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        recut(pieces, whole, 0, 4)
    assert recut(pieces, whole, 1, 2)["step"] == 3.0
    pieces[1] = (pieces[1][0], {})
    with pytest.raises(ValueError, match=r"has \['step'\] for the elements 0 to 1, but \[\] for"):
        recut(pieces, whole, 0, 4)


def test_the_state_of_another_model_is_no_state_of_a_part():
    state = {"exp_avg": torch.zeros(3, 3)}
    words = "the state 'exp_avg' of 'w' has the shape [3, 3], expected [2, 3]"
    with pytest.raises(ValueError, match=re.escape(words)):
        part_of_state(state, Whole("w", (2, 3), (3, 1)), 0, 2)


def shards_of(owners):
    """The state of two parameters, its shards, and what their owners are."""
    params = cuts.params_of([(2, 3), (5,)])
    wholes = cuts.wholes_of(params)
    full = cuts.trained(params, torch.optim.Adam).state_dict()
    cut = cuts.halves(wholes, owners)
    return full, cuts.shards_of(full, cut, wholes), cuts.shardings(wholes, cut)


FULL, SHARDS, OWN = shards_of(3)
_, OF_TWO, OWN_OF_TWO = shards_of(2)


def test_a_plain_optimizer_refuses_a_shard_also_one_of_which_a_framework_made_a_plain_dict():
    plain = torch.optim.Adam(cuts.params_of([(2, 3), (5,)]))
    with pytest.raises(ValueError, match=r"shard 1 of 3 of the state .*full_state_dict\(\) gives"):
        plain.load_state_dict(SHARDS[1])
    with pytest.raises(ValueError, match="parameter group that doesn't match the size"):
        plain.load_state_dict(dict(SHARDS[1]))
    # For a sharded one it is the shard.
    assert same(loaded(dict(SHARDS[1]), OWN[1]), loaded(SHARDS[1], OWN[1]))


def changed(**changes):
    """The first owner, with these changes."""
    return dataclasses.replace(OWN[0], **changes)


P0, P1 = OWN[0].wholes
OTHER_ORDER = changed(wholes=(Whole("p0", (2, 3), (1, 2)), P1))
OTHER_NAME = changed(wholes=(P0, Whole("x", (5,), (1,))))
OTHER_SHAPE = changed(wholes=(P0, Whole("p1", (6,), (1,))))
TWO_GROUPS = changed(group_sizes=(1, 1))
SHAPES = "'p1' of shape [5] there, and 'p1' of shape [6] here"
GROUPS = "has 1 parameter group with [2] parameters, and this optimizer 2 with [1, 1]"
FORMAT = "has version 9 of the format, and this hvdlite reads version 1"
EXPECTED = "expected what optimizer.state_dict() or full_state_dict()"
OF_ALL = (
    "the shard is one of 3, and here 2 ranks share the state: on every rank, give load_state_dict "
    "a list of the shards of all 3 owners, optimizer.load_state_dict([torch.load(file) for"
)
REFUSED: tuple[tuple[object, object, str], ...] = (
    (SHARDS[0], OWN[1], "is that of owner 0 of 3, and this rank is owner 1 (counted from 0)"),
    (SHARDS[0], OWN_OF_TWO[0], OF_ALL),
    (SHARDS[0], OTHER_ORDER, "lay in memory in another order (memory_format)"),
    (SHARDS[0], changed(optimizer="SGD"), "is of the optimizer Adam, and this one is SGD"),
    (SHARDS[0], OTHER_NAME, "'p1' of shape [5] there, and 'x' of shape [5] here"),
    (SHARDS[0], OTHER_SHAPE, SHAPES),
    (SHARDS, OTHER_SHAPE, SHAPES),
    (SHARDS[0], TWO_GROUPS, GROUPS),
    (SHARDS, TWO_GROUPS, GROUPS),
    (FULL, TWO_GROUPS, GROUPS),
    (SHARDS[0], changed(dealt_whole=True), "are cut anywhere, and here they are dealt out whole"),
    ([SHARDS[0], OF_TWO[1]], OWN[0], "were not saved together: one has 3 owners, another 2"),
    ({MARK: {"version": 9}}, OWN[0], FORMAT),
    (3, OWN[0], EXPECTED),
    ([], OWN[0], EXPECTED),
    ([{}], OWN[0], EXPECTED),
    ({}, OWN[0], "full_state_dict() gives {} on all ranks but rank 0"),
)


@pytest.mark.parametrize(("saved", "own", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_does_not_fit_is_refused_with_the_reason(saved, own, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        loaded(saved, own)


def test_a_rank_takes_the_cut_of_its_shard():
    division, _, states = loaded(SHARDS[0], changed(division=OWN[1].division))
    assert division == OWN[0].division
    assert same(states, loaded(SHARDS[0], OWN[0])[2])


def test_names_count_only_where_both_have_some():
    unnamed = (
        dataclasses.replace(whole, name=f"parameter {index}")
        for index, whole in enumerate(OWN[0].wholes)
    )
    loaded(SHARDS[0], changed(wholes=tuple(unnamed)))


def test_hosts_may_have_divided_the_state_in_different_ways():
    shards = copy.deepcopy([*OF_TWO, *SHARDS])
    for shard in shards:
        shard[MARK]["in_hosts"] = True
    assert same(loaded(shards, OWN[1])[2], loaded(FULL, OWN[1])[2])


def test_parameters_that_are_dealt_whole_keep_a_state_of_any_shape():
    wholes = (Whole("a", (2, 3), (3, 1)), Whole("b", (4,), (1,)))
    cut = ((Part(1, 0, 4),), (Part(0, 0, 6),))
    states = [{"row": torch.ones(2), "step": 3}, {"momentum": torch.ones(4)}]
    groups = [{"lr": 0.1, "params": [0, 1]}]
    own = cuts.shardings(wholes, cut, dealt_whole=True)
    full = {"state": dict(enumerate(states)), "param_groups": groups}
    shards = [
        shard_state_dict(each, full, [states[index]])
        for each, index in zip(own, (1, 0), strict=True)
    ]
    for saved in (shards[1], shards[::-1], full):
        assert same(loaded(saved, own[1])[2], [states[0]])
    with pytest.raises(ValueError, match="owner 1 has them"):
        loaded(shards[:1], own[1])
