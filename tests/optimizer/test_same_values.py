"""check_parameters and HVDLITE_CHECK_PARAMETERS: which rank is wrong, and in what."""

import itertools
import logging
import os
import pickle
import random
import warnings
import zlib

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.errors import DifferenceError
from hvdlite.optimizer.checks.fingerprints import bytes_of, digest, fingerprint, row_sums
from tests.optimizer.models import batches, loss_of, model, own

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def trained(net, make=torch.optim.Adam, steps=2, **options):
    optimizer = hvd.DistributedOptimizer(
        make(net.parameters(), lr=0.1), net.named_parameters(), **options
    )
    train(net, optimizer, steps)
    return optimizer


def train(net, optimizer, steps):
    rank, size = hvd.rank(), hvd.size()
    for x, y in batches(steps, 2, size):
        optimizer.zero_grad()
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        optimizer.step()


def flip(tensor, bit):
    tensor.detach().reshape(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


class Records(logging.Handler):
    """What the logger hvdlite is told inside."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("hvdlite").addHandler(self)
        return self.texts

    def __exit__(self, *_):
        logging.getLogger("hvdlite").removeHandler(self)


def flips(count, repair):
    """Bits of parameters and of state, each flipped on one rank: the text is the same on all."""
    hvd.init()
    net = model()
    optimizer = trained(net)
    places = dict(net.named_parameters())
    for name, param in net.named_parameters():
        places |= {f"{key} of {name}": value for key, value in optimizer.state[param].items()}
    assert hvd.check_parameters(net, optimizer) == []
    chance = random.Random(7)
    for _ in range(count):
        rank, name = chance.randrange(hvd.size()), chance.choice(sorted(places))
        tensor = places[name]
        bit = chance.randrange(8 * tensor.numel() * tensor.element_size())
        if hvd.rank() == rank:
            flip(tensor, bit)
        before = {key: value.detach().clone() for key, value in places.items()}
        if repair:
            with Records() as told:
                assert hvd.check_parameters(net, optimizer, repair=True) == [name]
            assert len(told) == (hvd.rank() == 0)
            if hvd.rank() == rank:
                flip(before[name], bit)
            assert all(as_bits(places[key]) == as_bits(before[key]) for key in places)
        else:
            with pytest.raises(DifferenceError) as caught:
                hvd.check_parameters(net, optimizer)
            assert (caught.value.tensor, caught.value.ranks) == (name, (rank,))
            assert caught.value.step == 2
            if hvd.rank() == rank:
                flip(tensor, bit)
    assert hvd.check_parameters(net, optimizer) == []


def as_bits(tensor):
    return bytes_of(tensor).numpy().tobytes()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(("count", "repair"), [(300, False), (60, True)])
def test_every_flipped_bit_is_found_with_its_tensor_and_its_rank(world, count, repair):
    world.run(flips, count, repair)


def periodic(steps, options):
    """A bit flips on the last rank after step 4."""
    hvd.init()
    net = model()
    optimizer = trained(net, torch.optim.SGD, 4, **options)
    if hvd.rank() == hvd.size() - 1:
        flip(net[2].weight, 77)
    with Records() as told:
        try:
            train(net, optimizer, steps)
        except DifferenceError as error:
            return error.tensor, error.ranks, error.step, str(error)
    return told


TEXT = "HVDLITE_CHECK_PARAMETERS: after step 6, parameter '2.weight' is not the same on all ranks: "


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}])
def test_every_n_steps_the_ranks_compare_and_raise_the_same(world, options):
    size = world.size
    told = world.run(periodic, 4, options, knobs={"HVDLITE_CHECK_PARAMETERS": "3"})
    assert told == [told[0]] * size
    tensor, ranks, step, text = told[0]
    if "op" in options:
        # The other ranks' deltas are combined with those of another start.
        assert step == 6
        return
    assert (tensor, ranks, step) == ("2.weight", (2,) if size == 3 else (), 6)
    who = (
        "rank 2 differs from ranks 0, 1, the majority"
        if size == 3
        else "no majority, between rank 0; rank 1"
    )
    assert text.startswith(f"{TEXT}{who} (")
    assert "broadcast_parameters" in text


def trains_alone(how):
    """Under HVDLITE_CHECK_PARAMETERS=3; what the logger was told, the world's end included."""
    hvd.shutdown()
    hvd.init()
    net = model()
    with Records() as told:
        if how == "local steps":
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            for _ in range(7):
                with optimizer.no_sync():
                    net(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
        elif how == "reduced steps":
            trained(net, steps=2)
        hvd.barrier()
        hvd.shutdown()
    hvd.init()
    return told


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "local steps",
            [
                "3 steps in a row were made with gradients that are not reduced",
                "has compared nothing",
            ],
        ),
        ("no optimizer of ours", ["has compared nothing"]),
        ("reduced steps", []),
    ],
)
def test_where_nothing_is_compared_rank_0_says_so(world, how, words):
    first, *others = world.run(trains_alone, how, knobs={"HVDLITE_CHECK_PARAMETERS": "3"})
    assert others == [[]] * (world.size - 1)
    assert len(first) == len(words)
    assert all(map(str.__contains__, first, words))


def test_a_repair_is_told_once_and_training_goes_on(world):
    knobs = {"HVDLITE_CHECK_PARAMETERS": "repair:3"}
    first, second = world.run(periodic, 8, {}, knobs=knobs)
    assert second == []
    (text,) = first
    assert text.startswith(f"{TEXT}no majority, between rank 0; rank 1 (")
    assert text.endswith(
        "Repaired: copied from rank 0, the lowest one, where no value has a majority: "
        "nobody knows which is right"
    )


def stays_the_same(kind):
    """No check raises where ranks rightly differ; a flipped bit is found in every case."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model()
    options = {}
    if kind == "shared":
        hvd.share_parameters(net)
    elif kind == "overlap":
        options = {"shard": True, "overlap_forward": net}
    elif kind == "free":
        options = {"free_gradients": True}
    elif kind == "passes":
        options = {"backward_passes_per_step": 2}
    else:
        options = {"op": hvd.Adasum} if kind == "adasum" else {"shard": kind}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters(), lr=0.1), net.named_parameters(), **options
    )
    for x, y in batches(3, 2, size):
        for _ in range(2 if kind == "passes" else 1):
            loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert hvd.check_parameters(net, optimizer, buffers=True) == []
    if rank == size - 1:
        flip(net[4].bias, 5)
    hvd.barrier()  # shared parameters are changed on both ranks
    if kind != "shared":
        assert hvd.check_parameters(net, optimizer, repair=True) == ["4.bias"]
    assert hvd.check_parameters(net, optimizer) == []


KINDS = [True, "host", "overlap", "shared", "adasum", "free", "passes"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_rightly_differs_is_left_out(world, kind):
    world.run(stays_the_same, kind, knobs={"HVDLITE_CHECK_PARAMETERS": "1"})


def shared_by_hosts():
    """The copy of the second host is wrong: both its ranks are."""
    hvd.init()
    net = nn.Linear(300, 5)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.share_parameters(net)
    before = net.weight.detach().clone()
    hvd.barrier()
    if hvd.rank() == 3:
        flip(net.weight, 1000)
    hvd.barrier()
    is_one_host = hvd.cross_size() == 1
    with Records():
        repaired = hvd.check_parameters(net, repair=True)
    assert repaired == ([] if is_one_host else ["weight"])
    hvd.barrier()
    assert torch.equal(net.weight, before) != is_one_host


@pytest.mark.ranks(4)
@pytest.mark.hosts("2,2")
def test_shared_parameters_of_a_host_are_repaired(world):
    world.run(shared_by_hosts)


def joins():
    """Rank 1 has joined when rank 0 checks; after it both do again, at the same steps."""
    hvd.init()
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    size = hvd.size()
    for epoch in range(2):
        for x, y in batches(3 if hvd.rank() else 7, 2, 1):
            loss_of(net, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0 and not hvd.rank():
            assert hvd.check_parameters(net, optimizer) == []
        hvd.join()
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    assert hvd.check_parameters(net) == []
    return optimizer._steps_made(), size


def test_a_rank_that_has_joined_is_left_out(world):
    assert world.run(joins, knobs={"HVDLITE_CHECK_PARAMETERS": "2"}) == [(14, 2), (6, 2)]


def in_a_set():
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1 + hvd.rank() % 2),
        net.named_parameters(),
        process_set=pair,
    )
    train(net, optimizer, 3)
    if hvd.rank() != 1:
        assert hvd.check_parameters(net, optimizer, process_set=pair) == []
        optimizer.param_groups[0]["lr"] = 0.5 if hvd.rank() else 0.25
        with pytest.raises(DifferenceError, match="option 'lr of parameter group 0' is not the"):
            hvd.check_parameters(net, optimizer, process_set=pair)
        repaired = hvd.check_parameters(net, optimizer, repair=True, process_set=pair)
        assert repaired == ["lr of parameter group 0"]
        assert optimizer.param_groups[0]["lr"] == 0.25
    hvd.remove_process_set(pair)


@pytest.mark.ranks(3)
def test_the_members_of_a_process_set_compare(world):
    world.run(in_a_set, knobs={"HVDLITE_CHECK_PARAMETERS": "1"})


def wrong_use():
    hvd.init()
    rank = hvd.rank()
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    told = []

    def tell(*args, **kwargs):
        try:
            told.append(hvd.check_parameters(*args, **kwargs))
        except (hvd.HorovodInternalError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")

    tell(net if rank else nn.Linear(3, 2))
    tell([("a", torch.zeros(2 + rank))])
    tell([("a", torch.zeros(2))] * (1 + rank))
    tell([("a", torch.zeros(2))], repair=bool(rank))
    tell(net if rank else "net")
    tell(net, 3 if rank else None)
    net(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)))
    tell(net)
    tell(net, buffers=True)
    tell([])
    return told


def test_wrong_use_is_an_error_on_every_rank(world):
    first, second = world.run(wrong_use)
    form = "HorovodInternalError: check_parameters: tensor {} is not the same on all ranks: {}; on "
    assert first[0] == second[0]
    names = (
        "parameter 'weight' float32[2, 3] on rank 0, parameter '0.weight' float32[2, 3] on rank 1"
    )
    assert first[0].startswith(form.format(0, names))
    shapes = "parameter 'a' float32[2] on rank 0, parameter 'a' float32[3] on rank 1"
    assert first[1].startswith(form.format(0, shapes))
    missing = "no such tensor on rank 0, parameter 'a' float32[2] on rank 1"
    assert first[2].startswith(form.format(1, missing))
    assert first[1:4] == second[1:4]
    assert "repair=False on rank 0, repair=True on rank 1" in first[3]
    assert first[4].startswith("ValueError: check_parameters: expected a module")
    assert second[4].startswith("HorovodInternalError: check_parameters: rank 0 raised")
    assert first[5].startswith("HorovodInternalError: check_parameters: rank 1 raised")
    assert second[5].startswith("ValueError: check_parameters: optimizer is int")
    assert first[6] == second[6] == []
    assert first[7] == second[7]
    assert "buffer '1.running_mean' is not the same" in first[7]
    assert "convert_sync_batchnorm" in first[7]
    assert first[8] == second[8] == []


def every_form():
    """Each rank's own values become rank 0's, whatever form the tensor has."""
    hvd.init()
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(torch.ones(3) * hvd.rank(), 0.5, 0, torch.qint8)
    own_values = float(hvd.rank() + 1)
    tensors = {
        str(dtype): torch.full((5, 3), own_values).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.complex64)
    }
    tensors["float8"] = torch.full((7,), own_values).to(torch.float8_e4m3fn)
    tensors["bool"] = torch.tensor(hvd.rank() == 0)
    tensors["strided"] = torch.full((4, 6), own_values)[::2, ::3]
    tensors["expanded"] = torch.full((1, 3), own_values).expand(4, 3)
    tensors["conj"] = torch.full((3,), own_values * 1j).conj()
    tensors["large"] = torch.full((1 << 20, 3), own_values)
    tensors["empty"] = torch.empty(0, 3)
    tensors["meta"] = torch.empty(3, device="meta")
    with Records():
        repaired = hvd.check_parameters(tensors, repair=True)
    assert repaired == sorted(tensors.keys() - {"empty", "meta"})
    assert hvd.check_parameters(tensors) == []
    assert tensors["strided"].unique().tolist() == tensors["expanded"].unique().tolist() == [1.0]
    assert tensors["conj"].tolist() == [-1j] * 3
    assert tensors["bool"].item() is True
    with pytest.raises(DifferenceError, match="parameter 'quantized' is not the same"):
        hvd.check_parameters({"quantized": quantized}, repair=True)


def test_tensors_of_every_form_are_compared_and_repaired(world):
    world.run(every_form)


@pytest.mark.parametrize("values", [("0", "5"), ("5", "repair:5")])
def test_a_variable_that_differs_is_an_error(world, values):
    here, there = (f"HVDLITE_CHECK_PARAMETERS={value}" for value in values)
    world.run(differing_knob, values, f"{here} on rank 0, {there} on rank 1; give every")


def differing_knob(values, text):
    hvd.init()
    rank = hvd.rank()
    hvd.shutdown()
    os.environ["HVDLITE_CHECK_PARAMETERS"] = values[rank]
    try:
        hvd.init()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            trained(model(), torch.optim.SGD)
        assert text in str(caught.value)
    finally:
        del os.environ["HVDLITE_CHECK_PARAMETERS"]
        hvd.shutdown()  # the next case gets a world with the same variables on all ranks


def alone():
    hvd.init()
    net = model()
    optimizer = trained(net)
    assert hvd.check_parameters(net, optimizer, repair=True) == []
    with pytest.raises(ValueError, match="buffers=True needs a module"):
        hvd.check_parameters(net.state_dict(), buffers=True)
    loss_of(net, torch.ones(1, 6, dtype=torch.float64), torch.ones(1, 1)).backward()
    hvd.shutdown()
    optimizer.step()


@pytest.mark.ranks(1)
def test_one_rank_alone_is_the_same_as_itself(world):
    world.run(alone, knobs={"HVDLITE_CHECK_PARAMETERS": "1"})


@pytest.mark.parametrize("of", [fingerprint, lambda t: digest(row_sums(t).tolist())])
def test_one_flipped_bit_or_two_swapped_words_change_a_fingerprint(of):
    values = torch.randn(20)
    values[7] = values[9]
    found = {of(bytes_of(values))}
    for bit in range(32 * 20):
        flip(values, bit)
        found.add(of(bytes_of(values)))
        flip(values, bit)
    assert len(found) == 1 + 32 * 20
    for i, j in itertools.combinations(range(20), 2):
        values[[i, j]] = values[[j, i]]
        assert (of(bytes_of(values)) in found) == ((i, j) == (7, 9))
        values[[i, j]] = values[[j, i]]


def numbers(index):
    """SplitMix64's finalizer, made odd."""
    mixed = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) | 1


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4095, 4096, 4097, 8192, 12301])
def test_a_fingerprint_is_the_sum_that_its_module_says(size):
    for at in range(3):  # at any address
        data = torch.randint(256, (at + size,), dtype=torch.uint8)[at:]
        words = [int.from_bytes(data[i : i + 4].tolist(), "little") for i in range(0, size, 4)]
        rows = [words[i : i + 1024] for i in range(0, size // 4, 1024)]
        rows = [row[: size // 4 - 1024 * i] for i, row in enumerate(rows)]
        rows += [words[-1:]] * (size % 4 > 0)
        sums = [sum(word * (numbers(i) % 2**32) for i, word in enumerate(row)) for row in rows]
        if size % 4:
            sums[-1] = words[-1]
        expected = sum(each * numbers(i) for i, each in enumerate(sums)) % 2**64
        assert fingerprint(data) == expected


def test_no_two_words_of_a_row_have_the_same_number():
    data = torch.zeros(1024, dtype=torch.int32)
    found = set()
    for index in range(1024):
        data[index] = 1
        found.add(fingerprint(bytes_of(data)))
        data[index] = 0
    assert len(found) == 1024


def test_one_other_fingerprint_or_two_swapped_ones_change_the_digest():
    numbers = [zlib.crc32(bytes([i])) for i in range(50)]
    for i, bit in itertools.product(range(50), range(64)):
        changed = [*numbers[:i], numbers[i] ^ (1 << bit), *numbers[i + 1 :]]
        assert digest(changed) != digest(numbers)
    assert len({digest(order) for order in itertools.permutations(numbers[:5])}) == 120


def test_the_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(DifferenceError("text", "w", (1, 2), 3)))
    assert (str(error), error.tensor, error.ranks, error.step) == ("text", "w", (1, 2), 3)
