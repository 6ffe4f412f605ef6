"""Seeds of ranks and of the workers of their data loaders."""

import itertools
import random

import numpy
import pytest
import torch

import hvdlite as hvd
from hvdlite.recipes import seed_workers, seeded_generator, set_seed


def draws():
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def draws_after(seed, per_rank):
    hvd.init()
    used = set_seed(seed, per_rank=per_rank)
    return used, draws(), torch.rand(1, generator=seeded_generator(seed, per_rank)).item()


def draws_of_others(seed):
    """Of virtual ranks, on any rank."""
    hvd.init()
    return [set_seed(seed, rank=rank) for rank in range(3)]


@pytest.mark.ranks(3)
def test_any_rank_can_draw_the_numbers_of_another_one(world):
    used = [of_rank for of_rank, _, _ in world.run(draws_after, 1, True)]
    assert world.run(draws_of_others, 1) == [used] * 3
    for arguments in ({"rank": -1}, {"rank": 0, "per_rank": False}):
        with pytest.raises(ValueError, match="expected a rank of at least 0"):
            set_seed(1, **arguments)


def draws_of_one_process(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return draws()


@pytest.mark.ranks(3)
def test_every_rank_draws_other_numbers_and_rank_0_those_of_one_process(world):
    runs = {seed: world.run(draws_after, seed, True) for seed in (0, 1)}
    assert world.run(draws_after, 1, True) == runs[1]
    for seed, results in runs.items():
        used, drawn, by_generator = results[0]
        assert used == seed
        assert drawn == draws_of_one_process(seed)
        assert by_generator == drawn[2]
    # Neither two ranks nor two seeds have a number in common, as with seed + rank.
    every = [number for results in runs.values() for _, drawn, _ in results for number in drawn]
    assert len(set(every)) == 2 * 3 * 3
    assert len({used for results in runs.values() for used, _, _ in results}) == 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seed", [42, 2**63 + 5])
def test_without_per_rank_all_draw_the_same(world, seed):
    one, other = world.run(draws_after, seed, False)
    assert one == other
    assert one[0] == seed


class Draws(torch.utils.data.Dataset):
    """Each sample is what its worker draws."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(draws(), dtype=torch.float64)


def drawn_by_workers(start, safe):
    hvd.init()
    set_seed(7, per_rank=False)
    loader = torch.utils.data.DataLoader(
        Draws(),
        num_workers=2,
        worker_init_fn=seed_workers() if safe else None,
        multiprocessing_context=start,
    )
    epochs = 1 if start == "spawn" else 2
    return [
        number for _ in range(epochs) for batch in loader for number in batch.flatten().tolist()
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.wide)])
def test_the_workers_of_all_ranks_draw_other_numbers_in_every_epoch(world, start):
    numbers = list(itertools.chain(*world.run(drawn_by_workers, start, True)))
    assert len(numbers) == 2 * 4 * 3 * (1 if start == "spawn" else 2)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.ranks(2)
def test_without_seed_workers_equal_seeds_make_equal_workers(world):
    one, other = world.run(drawn_by_workers, "fork", False)
    assert one == other


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (-1, r"set_seed: seed=-1, expected 0 to 2\*\*64 - 1"),
        (2**64, r"expected 0 to 2\*\*64 - 1"),
        (0.5, "set_seed: seed=0.5 is float, expected an int"),
        (None, "set_seed: seed=None is NoneType, expected an int"),
    ],
)
def test_a_seed_is_an_unsigned_integer_of_64_bits(seed, text):
    with pytest.raises(ValueError, match=text):
        set_seed(seed, per_rank=False)
