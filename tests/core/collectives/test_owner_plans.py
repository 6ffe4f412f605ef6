"""What becomes of plans with owners: ranks that disagree about them, have joined or have left, and
plans that are started again, released or refused."""

import itertools

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from tests.core import limits
from tests.core.owner_plans import (
    TO_OWNERS,
    UNITE,
    bits,
    engine,
    given,
    own_of,
    plan_of,
    run,
)

pytestmark = pytest.mark.above_mpi  # the bits, and who owns what
KNOBS = ["tiny knobs", pytest.param("default knobs", marks=pytest.mark.wide)]

# ---- ranks that disagree, have joined, or have left ----

FORMS = {
    "reducescatters": (_core.PLAN_TO_OWNERS, _core.PLAN_TO_HOST_OWNERS),
    "a reducescatter and an allreduce": (_core.PLAN_WHOLE, _core.PLAN_TO_OWNERS),
    "allgathers": (_core.PLAN_UNITE, _core.PLAN_UNITE_ON_HOST),
    "an allgather and an allreduce": (_core.PLAN_WHOLE, _core.PLAN_UNITE),
}
CALLED = {
    _core.PLAN_WHOLE: "plan of allreduce",
    _core.PLAN_TO_OWNERS: "plan of reducescatter to owners among all ranks",
    _core.PLAN_TO_HOST_OWNERS: "plan of reducescatter to owners on each host",
    _core.PLAN_UNITE: "allgather from owners among all ranks",
    _core.PLAN_UNITE_ON_HOST: "allgather from owners on each host",
}


def disagree(forms):
    hvd.init()
    texts = []
    for turn in range(2):
        form = forms[(hvd.rank() + turn) % 2]
        texts.append(run("disputed", form, torch.ones(5)))
        assert hvd.allreduce(torch.ones(7), op=hvd.Sum).tolist() == [hvd.size()] * 7
    return texts


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_ranks_that_give_a_plan_two_forms_get_one_text_that_names_both(world, forms):
    first, *others = world.run(disagree, forms)
    assert all(texts == first for texts in others)
    for text in first:
        assert "operation 'disputed': rank " in text
        assert all(CALLED[form] in text for form in forms), text
        assert "call the same operations in the same order on every rank" in text


def unite_different_buffers():
    hvd.init()
    odd = hvd.rank() == 1
    cut = _core.BFLOAT16 if odd else _core.FLOAT32
    texts = [
        run("disputed", _core.PLAN_UNITE, torch.ones(6 if odd else 5)),
        run("disputed", _core.PLAN_UNITE, torch.ones(5), cut_as=cut),
    ]
    assert run("disputed", _core.PLAN_UNITE, torch.ones(5)) is None
    return texts


@pytest.mark.hosts("2,1")
def test_ranks_that_unite_different_buffers_get_one_text_that_names_both(world):
    (size, cut), *others = world.run(unite_different_buffers)
    assert all(texts == [size, cut] for texts in others)
    for text, words in ((size, "float32[6]"), (cut, "float32[5] cut as bfloat16")):
        assert (
            f"allgather 'disputed': rank 1 on host0 sent {words}, the other 2 ranks float32[5]"
            in text
        )


def call_with_one_joined():
    """Which rank joins first is made sure by MPI, which the engine knows nothing of."""
    from mpi4py import MPI

    hvd.init()
    last, count = hvd.size() - 1, 1000
    joined = given(hvd.rank(), count, torch.float32)
    whole, texts = joined.clone(), None
    plans = [plan_of(f"form {form}", form, joined) for form in TO_OWNERS.values()]
    warm = plan_of("whole", _core.PLAN_WHOLE, whole)
    for tensor, plan in zip((whole, joined, joined), (warm, *plans), strict=True):
        assert plan.start(tensor).wait() is None
    MPI.COMM_WORLD.Barrier()
    if hvd.rank() < last:
        texts = []
        whole.copy_(given(hvd.rank(), count, torch.float32))
        assert warm.start(whole).wait() is None
        for form, plan in zip(TO_OWNERS.values(), plans, strict=True):
            joined.copy_(given(hvd.rank(), count, torch.float32))
            assert plan.start(joined).wait() is None
            for begin, end in own_of(joined, form):
                assert bits(joined[begin:end]) == bits(whole[begin:end])
        for form in UNITE.values():
            texts.append(run(f"united {form}", form, joined))
    hvd.join()
    assert run("afterwards", _core.PLAN_UNITE, joined) is None
    return texts


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1", "2,2")
@pytest.mark.parametrize("knobs", KNOBS)
def test_a_joined_rank_adds_zeros_to_what_the_owners_get_and_lets_no_buffer_be_united(world, knobs):
    *others, last = world.run(call_with_one_joined, knobs=limits.KNOBS[knobs])
    assert last is None
    for texts in others:
        for text in texts:
            assert "allgather 'united " in text
            assert f"rank {world.size - 1} on " in text
            assert "has joined, and a joined rank takes part only in allreduce and barrier" in text


# ---- the life of such a plan ----


def start_and_release():
    hvd.init()
    tensor = torch.ones(1000)
    engine().record(1000)
    for form in (*TO_OWNERS.values(), *UNITE.values()):
        plan = plan_of("plan", form, tensor)
        if hvd.size() > 1 and hvd.rank() == 0:
            first = plan.start(tensor)
            with pytest.raises(RuntimeError, match="previous run"):
                plan.start(tensor)
            assert hvd.broadcast(torch.ones(1), 0) == 1
        else:
            hvd.size() > 1 and hvd.broadcast(torch.ones(1), 0)
            first = plan.start(tensor)
        assert first.wait() is None
        runs = [plan.start(tensor).wait() for _ in range(2)]
        assert runs == [None, None]
        run_of_last = plan.start(tensor)
        del plan  # before its run has ended
        assert run_of_last.wait() is None
    done = [
        event[2]
        for event in engine().drain_events()[0]
        if event[4] == "DONE" and event[3] == "plan"
    ]
    engine().record(0)
    return [kind for kind, _ in itertools.groupby(done)]


@pytest.mark.ranks(1, 2)
@pytest.mark.hosts("2,1")
def test_plans_with_owners_are_started_again_released_and_recorded_as_others_are(world):
    kinds = world.run(start_and_release)
    runs = ["reducescatter", "allgather"]
    made = ["plan", "reducescatter", "plan", "reducescatter", "allgather"]
    assert kinds == [runs if world.size == 1 else made] * world.size


def refuse():
    hvd.init()
    tensor, other = torch.ones(4), torch.ones(4)
    cases = {
        "united in place": [
            {"form": _core.PLAN_UNITE, "output": other},
            {"form": _core.PLAN_UNITE_ON_HOST, "prescale": 2.0},
        ],
        "form or cut_as out of range": [
            {"form": _core.BROADCAST},
            {"form": 99},
            {"form": -1},
            {"form": _core.PLAN_UNITE, "cut_as": 99},
        ],
        "only what is united can be cut as another dtype": [
            {"form": _core.PLAN_TO_OWNERS, "cut_as": _core.BFLOAT16},
            {"form": _core.PLAN_WHOLE, "cut_as": _core.BFLOAT16},
        ],
    }
    for text, options in cases.items():
        for option in options:
            with pytest.raises(ValueError, match=text):
                plan_of("refused", option.pop("form"), tensor, **option)
    at = tensor.data_ptr()
    for error, form, address, extents, text in (
        (ValueError, _core.PLAN_TO_OWNERS, 0, [(0, 4, at)], "united within a host"),
        (ValueError, _core.PLAN_WHOLE, 0, [], "united within a host"),
        (ValueError, _core.PLAN_UNITE, at, [(0, 4, at)], "its address is 0"),
        (ValueError, _core.PLAN_UNITE, 0, [(0, 5, at)], "within the buffer's 4 elements"),
        (ValueError, _core.PLAN_UNITE, 0, [(-1, 2, at)], "within the buffer"),
        (ValueError, _core.PLAN_UNITE, 0, [(2, 2, at)], "empty"),
        (ValueError, _core.PLAN_UNITE, 0, [(0, 4, 0)], "has no memory"),
        (ValueError, _core.PLAN_UNITE, 0, [(0, 2, at), (1, 4, at)], "before the end of the one"),
        (TypeError, _core.PLAN_UNITE, 0, [(0, 4)], "argument"),
        (TypeError, _core.PLAN_UNITE, 0, [[0, 4, at]], "tuple"),
        (TypeError, _core.PLAN_UNITE, 0, 5, "iterable"),
        (OverflowError, _core.PLAN_UNITE, 0, [(0, 4, -1)], "negative"),
    ):
        with pytest.raises(error, match=text):
            engine().plan(
                *("refused", _core.FLOAT32, _core.SUM, address, address, 4, 1.0, 1.0, tensor),
                form=form,
                extents=extents,
            )
    for arguments in ((4, 7, _core.PLAN_WHOLE, 0), (4, 7, _core.PLAN_UNITE, hvd.size())):
        with pytest.raises(ValueError, match="no such member, or a form without owners"):
            engine().owned(*arguments)
    with pytest.raises(ValueError, match="out of range"):
        engine().owned(-1, 7, _core.PLAN_UNITE, 0)


@pytest.mark.ranks(1)
def test_what_a_plan_can_not_be_is_refused_where_it_is_made(world):
    world.run(refuse)
