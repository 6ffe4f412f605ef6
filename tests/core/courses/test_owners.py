"""Plans that reduce to owners, and that unite what the owners have: the two halves of an allreduce."""

import itertools

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from tests.core import limits

OPS = {
    "Sum": (_core.SUM, 1.0, 1.0),
    "Average": (_core.AVERAGE, 1.0, 1.0),
    "scaled": (_core.SUM, 0.5, 3.0),
}
TO_OWNERS = {"all": _core.PLAN_TO_OWNERS, "host": _core.PLAN_TO_HOST_OWNERS}
UNITE = {"all": _core.PLAN_UNITE, "host": _core.PLAN_UNITE_ON_HOST}
COUNTS = (0, 1, 2, 5, 33, 251, 1001, 4097)


def engine():
    return worlds.current().team.engine


def run(name, form, tensor, op=_core.SUM, prescale=1.0, postscale=1.0, output=None, **cut):
    to = tensor if output is None else output
    number = getattr(_core, str(tensor.dtype).removeprefix("torch.").upper())
    plan = engine().plan(
        *(name, number, op, tensor.data_ptr(), to.data_ptr(), tensor.numel(), prescale, postscale),
        (tensor, to),
        form=form,
        **cut,
    )
    return plan.start((tensor, to)).wait()


def members_of(owners):
    """Of all ranks, or of this rank's host."""
    hosts = worlds.current().placement.hosts
    own = [ranks for ranks in hosts if hvd.rank() in ranks]
    return list(range(hvd.size())) if owners == "all" else list(own[0])


def given(rank, count, dtype):
    """Sums of these depend on their order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** (values * 2).round().clamp(-3, 3)).to(dtype)


def bits(tensor):
    return tensor.view(torch.uint8).tolist()


def reduce_and_unite(dtype_name, counts):
    hvd.init()
    wrong = []
    dtype, number = getattr(torch, dtype_name), getattr(_core, dtype_name.upper())
    for count, (op_name, op), owners in itertools.product(counts, OPS.items(), TO_OWNERS):
        name = f"{count} {op_name} {owners}"
        whole = given(hvd.rank(), count, dtype)
        half, apart = whole.clone(), torch.full_like(whole, 7)
        source = whole.clone()
        texts = [
            run(f"{name} whole", _core.PLAN_WHOLE, whole, *op),
            run(f"{name} half", TO_OWNERS[owners], half, *op),
            run(f"{name} apart", TO_OWNERS[owners], source, *op, output=apart),
        ]
        own = engine().owned(count, number, TO_OWNERS[owners], hvd.rank())
        for begin, end in own:
            if bits(half[begin:end]) != bits(whole[begin:end]):
                wrong.append(f"{name}: {begin}:{end}, in place")
            if bits(apart[begin:end]) != bits(whole[begin:end]):
                wrong.append(f"{name}: {begin}:{end}, from input to output")
        if bits(source) != bits(given(hvd.rank(), count, dtype)):
            wrong.append(f"{name}: the input has changed")
        theirs = torch.full_like(half, 5)
        for begin, end in own:
            theirs[begin:end] = half[begin:end]
        texts.append(run(f"{name} united", UNITE[owners], theirs))
        if bits(theirs) != bits(whole):
            wrong.append(f"{name}: united")
        wrong += [text for text in texts if text]
    return wrong


@pytest.mark.ranks(2, 3, 4, 7)
@pytest.mark.hosts("1,1", "2,1", "2,2", "1,1,1", "3,1", "1,3,3")
@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct", "recursive_doubling"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("knobs", limits.KNOBS)
def test_the_owners_get_the_bits_of_the_allreduce_and_uniting_gives_them_to_all(
    world, knobs, dtype, algorithm
):
    chosen = {**limits.KNOBS[knobs], "HVDLITE_ALGORITHM": algorithm}
    assert world.run(reduce_and_unite, dtype, COUNTS, knobs=chosen) == [[]] * world.size
