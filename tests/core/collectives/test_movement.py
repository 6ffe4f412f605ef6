"""broadcast, allgather and barrier: data that arrives as it left, on one host and on several."""

from pathlib import Path

import pytest
import torch

import hvdlite as hvd
from tests.core import limits, oracles

pytestmark = [pytest.mark.ranks(*limits.SIZES), pytest.mark.hosts(*limits.LAYOUTS)]


def own_data(dtype, rank, size, count):
    """Values that differ on every rank, as far as the type has enough of them."""
    if dtype == "bool":
        return (torch.arange(count) * 5 + rank) % 7 < 3
    return oracles.case_of(dtype, "Sum", rank, size, count)[0]


def broadcast_from_every_root(dtype, knobs):
    hvd.init()
    wrong = []
    handles = []
    for count in limits.counts(knobs, dtype, hvd.size()):
        for root in range(hvd.size()):
            given = own_data(dtype, hvd.rank(), hvd.size(), count)
            expected = own_data(dtype, root, hvd.size(), count)
            kept = given.clone()
            got = hvd.broadcast(given, root_rank=root)
            if problem := oracles.mismatch(got, expected):
                wrong.append(f"{count} from {root}: {problem}")
            if not torch.equal(given, kept):
                wrong.append(f"{count} from {root}: the input has changed")
            name = f"{count} from {root} in place"
            handles.append((name, given, expected, hvd.broadcast_async_(given, root, name=name)))
    for name, given, expected, handle in handles:
        hvd.synchronize(handle)
        if problem := oracles.mismatch(given, expected):
            wrong.append(f"{name}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("knobs", limits.KNOBS)
@pytest.mark.parametrize(
    "dtype", oracles.mostly_on_few_ranks([*oracles.WIDTHS, "bool"], ("float32",))
)
def test_broadcast_gives_everyone_the_data_of_the_root(world, dtype, knobs):
    world.run(broadcast_from_every_root, dtype, knobs, knobs=limits.KNOBS[knobs])


# The rows that each rank gives.
ROWS = {
    "as many from each": lambda rank, size: 5,
    "each one more": lambda rank, size: rank + 1,
    "none from rank 0": lambda rank, size: rank * 3,
    "all from the last": lambda rank, size: 11 if rank == size - 1 else 0,
    "none at all": lambda rank, size: 0,
    "many": lambda rank, size: 257 + 31 * rank,
}


def gather_rows(dtype, row_shape):
    hvd.init()

    def rows_of(rank, rows):
        width = torch.Size(row_shape).numel()
        return own_data(dtype, rank, hvd.size(), rows * width).reshape(rows, *row_shape)

    wrong = []
    handles = {}
    for name, rows in ROWS.items():
        given = rows_of(hvd.rank(), rows(hvd.rank(), hvd.size()))
        handles[name] = hvd.allgather_async(given, name=name)
    for name, rows in ROWS.items():
        every = [rows_of(rank, rows(rank, hvd.size())) for rank in range(hvd.size())]
        got = hvd.synchronize(handles[name])
        again = hvd.allgather(every[hvd.rank()])
        for result in (got, again):
            if problem := oracles.mismatch(result, torch.cat(every)):
                wrong.append(f"{name}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("knobs", limits.KNOBS)
@pytest.mark.parametrize(
    ("dtype", "row_shape"),
    [("uint8", (3,)), ("bfloat16", ()), ("float32", (7, 5)), ("int64", (2, 0)), ("bool", (1, 2))],
)
def test_allgather_joins_the_rows_in_the_order_of_the_ranks(world, dtype, row_shape, knobs):
    world.run(gather_rows, dtype, row_shape, knobs=limits.KNOBS[knobs])


def move_every_type():
    hvd.init()
    wrong = []
    for dtype in oracles.DTYPES:
        every = [own_data(dtype, rank, hvd.size(), 37) for rank in range(hvd.size())]
        own = every[hvd.rank()]
        for name, got, expected in [
            ("broadcast", hvd.broadcast(own, root_rank=1), every[1]),
            ("allgather", hvd.allgather(own), torch.cat(every)),
        ]:
            if problem := oracles.mismatch(got, expected):
                wrong.append(f"{name} of {dtype}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
def test_every_type_arrives_as_it_left(world):
    world.run(move_every_type)


def gather_a_scalar():
    hvd.init()
    try:
        hvd.allgather(torch.tensor(1.0))
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


@pytest.mark.ranks(2)
@pytest.mark.hosts
def test_allgather_of_a_scalar_is_an_error(world):
    assert all("scalar" in text for text in world.run(gather_a_scalar))


def arrive_and_pass(folder, rounds):
    hvd.init()
    missing = []
    for turn in range(rounds):
        Path(folder, f"{turn}.{hvd.rank()}").touch()
        hvd.barrier()
        here = len(list(Path(folder).glob(f"{turn}.*")))
        if here != hvd.size():
            missing.append((turn, here))
    assert not missing, missing


def test_nobody_passes_a_barrier_before_all_have_come(world, tmp_path):
    world.run(arrive_and_pass, str(tmp_path), 20)


def pass_a_barrier_with_an_operation_pending():
    hvd.init()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(5), name="pending", op=hvd.Sum)
    hvd.barrier()
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(torch.ones(5), name="pending", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 5


def test_a_barrier_completes_while_other_operations_are_pending(world):
    world.run(pass_a_barrier_with_an_operation_pending)
