"""Plans that reduce to owners, and plans that unite what the owners have: the halves of an
allreduce."""

import itertools
import random

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from tests.core import limits
from tests.core.owner_plans import (
    TO_OWNERS,
    UNITE,
    bits,
    engine,
    given,
    number_of,
    own_of,
    run,
)

OPS = {
    "Sum": (_core.SUM, 1.0, 1.0),
    "Average": (_core.AVERAGE, 1.0, 1.0),
    "scaled": (_core.SUM, 0.5, 3.0),
}
COUNTS = (0, 1, 2, 5, 33, 251, 1001, 4097)
LAYOUTS = ("1,1", "2,1", "2,2", "1,1,1", "3,1", "1,3,3")

pytestmark = pytest.mark.above_mpi  # the bits, and who owns what
on_hosts = pytest.mark.hosts(*LAYOUTS)
on_few_hosts = pytest.mark.hosts("1,1", "3,1", "1,1,1")


# ---- what comes out ----


def halves_of_an_allreduce(dtype_name):
    hvd.init()
    wrong = []
    dtype = getattr(torch, dtype_name)
    for count, (op_name, op), owners in itertools.product(COUNTS, OPS.items(), TO_OWNERS):
        name = f"{count} {op_name} {owners}"
        source = given(hvd.rank(), count, dtype)
        whole, half, apart = source.clone(), source.clone(), torch.full_like(source, 7)
        texts = [
            run(f"{name} whole", _core.PLAN_WHOLE, whole, *op),
            run(f"{name} half", TO_OWNERS[owners], half, *op),
            run(f"{name} apart", TO_OWNERS[owners], source, *op, output=apart),
        ]
        united = torch.full_like(half, 5)
        for begin, end in own_of(half, TO_OWNERS[owners]):
            united[begin:end] = half[begin:end]
            if bits(half[begin:end]) != bits(whole[begin:end]):
                wrong.append(f"{name}: {begin}:{end}, in place")
            if bits(apart[begin:end]) != bits(whole[begin:end]):
                wrong.append(f"{name}: {begin}:{end}, from input to output")
        if bits(source) != bits(given(hvd.rank(), count, dtype)):
            wrong.append(f"{name}: the input has changed")
        texts.append(run(f"{name} united", UNITE[owners], united))
        if bits(united) != bits(whole):
            wrong.append(f"{name}: united")
        wrong += [text for text in texts if text]
    return wrong


DTYPES = [
    "float32",
    *(pytest.param(name, marks=pytest.mark.wide) for name in ("bfloat16", "float64")),
]
KNOBS = ["tiny knobs", pytest.param("default knobs", marks=pytest.mark.wide)]


@pytest.mark.ranks(1, 2, 3, 4, 7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("knobs", KNOBS)
def test_on_one_host_owners_get_the_bits_of_an_allreduce_and_uniting_gives_them_to_all(
    world, knobs, dtype
):
    knobs = limits.KNOBS[knobs]
    assert world.run(halves_of_an_allreduce, dtype, knobs=knobs) == [[]] * world.size


@on_hosts
@pytest.mark.wide_in("2,1", "2,2", "1,3,3")
@pytest.mark.parametrize(
    "algorithm",
    ["ring", "direct", "recursive_doubling", pytest.param("auto", marks=pytest.mark.wide)],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("knobs", KNOBS)
def test_on_several_hosts_owners_get_the_bits_of_an_allreduce_and_uniting_gives_them_to_all(
    world, knobs, dtype, algorithm
):
    knobs = {**limits.KNOBS[knobs], "HVDLITE_ALGORITHM": algorithm}
    assert world.run(halves_of_an_allreduce, dtype, knobs=knobs) == [[]] * world.size


def unite_as_another_dtype():
    """Parameters of 32 bits, whose gradients travelled as 16."""
    hvd.init()
    for count, owners in itertools.product(COUNTS, UNITE):
        form, cut = UNITE[owners], _core.BFLOAT16
        ranges = own_of(torch.empty(count, dtype=torch.bfloat16), TO_OWNERS[owners])
        united = torch.zeros(count)
        assert own_of(united, form, cut) == ranges
        for begin, end in ranges:
            united[begin:end] = torch.arange(begin + 1, end + 1)
        assert run(f"cut {count} {owners}", form, united, cut_as=cut) is None
        assert torch.equal(united, torch.arange(1, count + 1).float())


@pytest.mark.ranks(3)
@on_few_hosts
def test_a_buffer_is_united_by_the_cut_of_another_dtype(world):
    world.run(unite_as_another_dtype, knobs=limits.TINY)


# ---- buffers in extents ----


def extents_of(count, seed):
    """Ranges with and without gaps between them, from one element to most of the buffer."""
    numbers = random.Random(seed)
    ends = sorted({numbers.randrange(count + 1) for _ in range(numbers.choice((0, 2, 5, 60)))})
    ranges = list(itertools.pairwise(ends))
    return [pair for pair in ranges if numbers.random() < 0.8]


def unite_in_extents(dtype_name, cut_name, forms):
    """Each extent has memory of its own, with some before and behind it that must stay."""
    hvd.init()
    dtype, wrong = getattr(torch, dtype_name), []
    cut = -1 if cut_name is None else number_of(getattr(torch, cut_name))
    for count, form, seed in itertools.product(COUNTS[1:], forms, range(3)):
        name = f"extents {count} {form} {seed}"
        ranges = extents_of(count, (count, form, seed).__hash__())
        whole = torch.arange(count).remainder(251).to(dtype)
        mine = torch.full_like(whole, 255 - hvd.rank() if dtype == torch.uint8 else -1)
        for begin, end in own_of(whole, form, *([cut] if cut >= 0 else [])):
            mine[begin:end] = whole[begin:end]
        memories = [torch.full((end - begin + 2 * 3,), 9).to(dtype) for begin, end in ranges]
        inner = [memory[3:-3] for memory in memories]
        for place, (begin, end) in zip(inner, ranges, strict=True):
            place.copy_(mine[begin:end])
        plan = engine().plan(
            *(name, number_of(dtype), _core.SUM, 0, 0, count, 1.0, 1.0, memories),
            form=form,
            cut_as=cut,
            extents=[(*pair, place.data_ptr()) for pair, place in zip(ranges, inner, strict=True)],
        )
        text = plan.start(memories).wait()
        wrong += [text] if text else []
        for memory, (begin, end) in zip(memories, ranges, strict=True):
            if bits(memory[3:-3]) != bits(whole[begin:end]):
                wrong.append(f"{name}: {begin}:{end}")
            if memory[:3].tolist() + memory[-3:].tolist() != [9] * 6:
                wrong.append(f"{name}: beside {begin}:{end}")
    return wrong


@pytest.mark.ranks(1, 2, 3, 4, 7)
@pytest.mark.wide_in(1, 4, 7)
@pytest.mark.parametrize(
    ("dtype", "cut_as"), [("float32", None), ("uint8", None), ("float64", "bfloat16")]
)
@pytest.mark.parametrize("knobs", KNOBS)
def test_a_buffer_in_extents_is_united_where_they_lie(world, knobs, dtype, cut_as):
    knobs = limits.KNOBS[knobs]
    assert world.run(unite_in_extents, dtype, cut_as, tuple(UNITE.values()), knobs=knobs) == [
        []
    ] * (world.size)


@pytest.mark.hosts("2,1", "3,2")
@pytest.mark.wide_in("3,2")
def test_on_each_of_several_hosts_a_buffer_in_extents_is_united_where_they_lie(world):
    forms = (_core.PLAN_UNITE_ON_HOST,)
    assert world.run(unite_in_extents, "float32", None, forms, knobs=limits.TINY) == [[]] * (
        world.size
    )


def unite_other_extents():
    hvd.init()
    memory = torch.ones(8)
    ends = ((0, 4), (4, 8)) if hvd.rank() else ((0, 3), (3, 8))
    texts = []
    for name, extents in (
        ("places", [(begin, end, memory[begin:].data_ptr()) for begin, end in ends]),
        ("kinds", None if hvd.rank() else [(0, 8, memory.data_ptr())]),
    ):
        at = memory.data_ptr() if extents is None else 0
        plan = engine().plan(
            *(name, _core.FLOAT32, _core.SUM, at, at, 8, 1.0, 1.0, memory),
            form=_core.PLAN_UNITE,
            extents=extents,
        )
        texts.append(plan.start(memory).wait())
    return texts


@pytest.mark.ranks(2)
def test_ranks_whose_extents_lie_elsewhere_in_the_buffer_get_one_text_that_names_both(world):
    (places, kinds), others = world.run(unite_other_extents)
    assert [places, kinds] == others
    assert "allgather 'places': rank" in places
    assert "float32 in a group of 2 tensors with 8 elements" in places
    assert "float32 in a group of 1 tensors with 8 elements" in kinds


# ---- who owns what ----


def all_owned():
    hvd.init()
    numbers = random.Random(1)
    counts = [*range(20), *(numbers.randrange(1 << numbers.randrange(4, 21)) for _ in range(60))]
    forms = (*TO_OWNERS.values(), *UNITE.values())
    hosts = worlds.current().placement.hosts
    said = {}
    for count, dtype, form in itertools.product(counts, (_core.UINT8, _core.FLOAT64), forms):
        ranges = [engine().owned(count, dtype, form, member) for member in range(hvd.size())]
        said[count, dtype, form] = ranges
        for own in ranges:
            ends = list(itertools.chain.from_iterable(own))
            assert ends == sorted(set(ends)), "not ascending, or two ranges touch"
        of_host = form in (_core.PLAN_TO_HOST_OWNERS, _core.PLAN_UNITE_ON_HOST)
        for members in hosts if of_host else [range(hvd.size())]:
            owned = sorted(itertools.chain.from_iterable(ranges[member] for member in members))
            assert [begin for begin, _ in owned] == [0, *(end for _, end in owned)][: len(owned)]
            assert count == (owned[-1][1] if owned else 0), "something is owned by none"
        if len(hosts) == 1:
            assert all(len(own) <= 1 for own in ranges)
            assert all(
                own[0][0] * (8 if dtype == _core.FLOAT64 else 1) % 64 == 0 for own in ranges if own
            )
        sizes = [sum(end - begin for begin, end in own) for own in ranges]
        if count > 1 << 16 and len({len(members) for members in hosts}) == 1:
            assert max(sizes) < 1.1 * min(sizes)
    return said


@pytest.mark.ranks(1, 2, 3, 4, 7)
@on_hosts
@pytest.mark.wide_in("2,1", "2,2")
@pytest.mark.parametrize("knobs", KNOBS)
def test_every_element_has_one_owner_and_all_ranks_agree_on_it(world, knobs):
    first, *others = world.run(all_owned, knobs=limits.KNOBS[knobs])
    assert all(said == first for said in others)


def owned_by_further_ranks():
    hvd.init()
    return [
        sum(end - begin for begin, end in engine().owned(96_000, _core.FLOAT32, form, member))
        for form in TO_OWNERS.values()
        for member in range(hvd.size())
    ]


@pytest.mark.hosts("3,1")
def test_ranks_of_a_host_with_more_ranks_than_another_share_its_half(world):
    sizes = world.run(owned_by_further_ranks)[0]
    assert sizes == [16_000, 16_000, 16_000, 48_000, 32_000, 32_000, 32_000, 96_000]


# ---- what travels ----


def sent_bytes():
    """What this rank sends to other hosts, by form."""
    hvd.init()
    sent = {}
    forms = {"whole": _core.PLAN_WHOLE, **{f"to owners of {who}": TO_OWNERS[who] for who in UNITE}}
    forms |= {f"unite {who}": UNITE[who] for who in UNITE}
    for name, form in forms.items():
        before = engine().counters()["data_bytes"]
        assert run(name, form, torch.ones(12 << 16)) is None
        sent[name] = engine().counters()["data_bytes"] - before
    return sent


@pytest.mark.hosts("1,1", "2,2", "1,1,1", "1,1,1,1")
@pytest.mark.parametrize("algorithm", ["auto", pytest.param("ring", marks=pytest.mark.wide)])
def test_each_half_sends_half_of_what_an_allreduce_sends_between_hosts(world, algorithm):
    by_rank = world.run(sent_bytes, knobs={"HVDLITE_ALGORITHM": algorithm})
    sent = {name: sum(of_rank[name] for of_rank in by_rank) for name in by_rank[0]}
    assert sent["whole"] > 0
    for half in ("to owners of all", "unite all"):
        assert sent[half] <= 0.55 * sent["whole"], half
    assert sent["to owners of host"] == sent["whole"]
    assert sent["unite host"] == 0
