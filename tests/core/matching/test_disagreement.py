"""Ranks that disagree get one error with one text, and the engine works on."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.own_names import OwnName

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.hosts("1,1", "2,2", "3,1")]


def reduce(tensor, **options):
    return hvd.allreduce(tensor, **{"name": "disputed", "op": hvd.Sum, **options})


# Rank 1 calls this with odd=True; then what the error has to name.
DISPUTES = {
    "dtype": (
        lambda odd: reduce(torch.ones(30, dtype=torch.float64 if odd else torch.float32)),
        ["float64[30]", "float32[30]"],
    ),
    "shape": (
        lambda odd: reduce(torch.ones((6, 5) if odd else (5, 6))),
        ["float32[6, 5]", "float32[5, 6]"],
    ),
    "number of elements": (
        lambda odd: reduce(torch.ones(2_000_000 if odd else 3)),
        ["float32[2000000]", "float32[3]"],
    ),
    "reduce op": (
        lambda odd: reduce(torch.ones(5), op=hvd.Max if odd else hvd.Sum),
        ["Max", "Sum"],
    ),
    "scale factor": (
        lambda odd: reduce(torch.ones(5), prescale_factor=0.5 if odd else 0.25),
        ["0.5", "0.25"],
    ),
    "root": (
        lambda odd: hvd.broadcast(torch.ones(5), root_rank=1 if odd else 0, name="disputed"),
        ["1", "0"],
    ),
    "rows of an allgather": (
        lambda odd: hvd.allgather(torch.ones(2, 5 if odd else 4), name="disputed"),
        ["5]", "4]"],
    ),
}


def disagree(dispute):
    hvd.init()
    texts = []
    for _ in range(2):
        try:
            DISPUTES[dispute][0](hvd.rank() == 1)
        except hvd.HorovodInternalError as error:
            texts.append(str(error))
        else:
            raise AssertionError("no error")
        # The engine goes on working, also under the same name.
        assert reduce(torch.ones(7)).tolist() == [hvd.size()] * 7
    return texts


@pytest.mark.parametrize("dispute", DISPUTES)
def test_a_disagreement_is_one_error_on_every_rank_that_names_both_sides(world, dispute):
    every = world.run(disagree, dispute)
    texts = {text for texts in every for text in texts}
    assert len(texts) == 1, texts
    (text,) = texts
    assert "'disputed'" in text
    assert "rank 1 " in text
    for value in DISPUTES[dispute][1]:
        assert value in text


def call_different_unnamed_operations():
    hvd.init()
    try:
        if hvd.rank() == 1:
            hvd.broadcast(torch.ones(5), root_rank=0)
        else:
            hvd.allreduce(torch.ones(5), op=hvd.Sum)
    except hvd.HorovodInternalError as error:
        assert hvd.allreduce(torch.ones(7), op=hvd.Sum).tolist() == [hvd.size()] * 7
        return str(error)
    raise AssertionError("no error")


def test_unnamed_operations_of_different_kinds_are_an_error_and_no_hang(world):
    texts = set(world.run(call_different_unnamed_operations))
    assert len(texts) == 1, texts
    (text,) = texts
    assert "allreduce" in text
    assert "broadcast" in text


def disagree_while_others_are_in_flight():
    hvd.init()
    good = [
        hvd.allreduce_async(torch.full((50_000,), float(i)), name=f"good {i}", op=hvd.Sum)
        for i in range(4)
    ]
    bad = hvd.allreduce_async(torch.ones(3 + (hvd.rank() == 1)), name="bad", op=hvd.Sum)
    good += [
        hvd.allreduce_async(torch.full((50_000,), float(i)), name=f"good {i}", op=hvd.Sum)
        for i in range(4, 8)
    ]
    failed = False
    try:
        hvd.synchronize(bad)
    except hvd.HorovodInternalError:
        failed = True
    sums = [hvd.synchronize(handle).unique().tolist() for handle in good]
    assert sums == [[float(i) * hvd.size()] for i in range(8)]
    return failed


def test_a_disagreement_harms_no_other_operation(world):
    assert all(world.run(disagree_while_others_are_in_flight))


def text_of(case):
    """Of the disagreement; None: there was none."""
    hvd.init()
    rank = hvd.rank()
    calls = {
        "zeros of both signs": lambda: reduce(torch.ones(3), prescale_factor=-0.0 if rank else 0.0),
        "nine dimensions": lambda: reduce(torch.ones((1,) * 8 + (2 + (rank == 1),))),
        "a long name": lambda: reduce(torch.ones(3 + (rank == 1)), name="nä" * 500),
        "six shapes": lambda: reduce(torch.ones(10 + min(rank, 5))),
    }
    try:
        calls[case]()
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


def the_text(world, case):
    (text,) = set(world.run(text_of, case))
    return text


def test_zeros_of_both_signs_are_the_same_factor(world):
    assert the_text(world, "zeros of both signs") is None


def test_what_is_left_out_of_a_shape_is_no_number_in_its_text(world):
    text = the_text(world, "nine dimensions")
    for elements in (2, 3):
        assert f"float32[{'1, ' * 7}...] of 9 dimensions and {elements} elements" in text


def test_a_long_name_leaves_room_for_what_each_rank_sent(world):
    text = the_text(world, "a long name")
    assert text.startswith("allreduce 'nänänä")
    assert "...': rank " in text
    assert "float32[3]" in text
    assert "float32[4]" in text
    assert text.endswith("; make the shape the same on every rank")


@pytest.mark.wide
@pytest.mark.ranks(7)
@pytest.mark.hosts("4,3")
def test_where_there_are_many_shapes_no_rank_is_listed_with_one_that_it_did_not_send(world):
    text = the_text(world, "six shapes")
    assert ", and 3 more ranks are not shown; make the shape the same on every rank" in text
    for rank in range(4):
        assert f"rank {rank} on " in text
        assert f"float32[{10 + rank}]" in text
    assert text.count("float32[") == 4


def call_an_own_one():
    """Ranks meet by the name; each reads its own words."""
    hvd.init()
    tensor = torch.ones(3 + hvd.rank() % 2)
    name = OwnName("same", f"what rank {hvd.rank()} does")
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(tensor, name=name)
    assert hvd.allreduce(torch.ones(3), name=name).tolist() == [1, 1, 1]
    return str(caught.value)


def test_an_operation_of_hvdlites_own_is_called_by_its_words(world):
    for rank, text in enumerate(world.run(call_an_own_one)):
        assert text.startswith(f"what rank {rank} does: "), text
        assert "float32[3]" in text
