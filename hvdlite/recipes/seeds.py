"""Seeds: of this rank, of the workers of its data loader, of a generator.

Follows numpy's SeedSequence (O'Neill, 2015, "Developing a seed_seq alternative"): streams of
different ranks come from a hash of seed and rank. With `seed + rank`, the common way, the runs
with seeds 0 and 1 would share all streams but one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy
import torch

from hvdlite.world import world


def set_seed(seed: int, per_rank: bool = True, *, rank: int | None = None) -> int:
    """Seeds `random`, numpy's global generator, and torch on the CPU and all GPUs.

    Any rank may call it, alone too; nothing is sent.

    Args:
        seed: 0 to 2**64 - 1; the same on every rank.
        per_rank: Every rank gets its own stream, for dropout and augmentation; rank 0 that of the
            seed itself, as a single process would. False: all ranks get the same, to draw the same
            start values; also before `init`.
        rank: The rank whose stream to use, if not this one: with virtual ranks that of each
            micro-batch, one of `hvd.virtual_ranks()`.

    Returns:
        The seed that torch got, 64 bits: the given one on rank 0 and without `per_rank`.

    Raises:
        ValueError: The seed is no int of this range; a rank without `per_rank`, or below 0.
        NotInitializedError: With `per_rank`, before `init`.

    Example:
        On rank 0:

        >>> from hvdlite.recipes import set_seed
        >>> set_seed(42)
        42
    """
    seed = _checked("set_seed", seed)
    if rank is not None and (not per_rank or rank < 0):
        raise ValueError(
            f"set_seed: rank={rank!r} with per_rank={per_rank!r}, expected a rank of at least 0, "
            "whose stream differs from that of others"
        )
    if per_rank:
        seed = _of_rank(seed, world.rank() if rank is None else rank)
    _seed_all(seed)
    return seed


def seeded_generator(seed: int, per_rank: bool = True) -> torch.Generator:
    """A generator of torch on the CPU with the stream that `set_seed` would give this rank.

    For `DataLoader(generator=…)` and samplers: their draws then do not depend on other random
    draws, nor change them. Arguments and errors are those of `set_seed`.

    Pass it to `Checkpointer` too, which by itself saves only Python's, NumPy's and torch's own
    generators.

    Example:
        >>> from hvdlite.recipes import seeded_generator
        >>> seeded_generator(42, per_rank=False).initial_seed()
        42
    """
    seed = _checked("seeded_generator", seed)
    generator = torch.Generator(device="cpu")
    return generator.manual_seed(_of_rank(seed, world.rank()) if per_rank else seed)


def seed_workers() -> Callable[[int], None]:
    """A `worker_init_fn` for `DataLoader`: every worker of every rank gets its own streams.

    PyTorch seeds the workers of one loader differently, from a number that it draws on the rank in
    every epoch. If the ranks draw the same (`set_seed` without `per_rank`, loaders with equal
    generators), worker i would make the same random choices on every rank.

    Call it on the rank; the result works in workers of any start method.

    Raises:
        NotInitializedError: Before `init`.

    Example:
        >>> from hvdlite.recipes import seed_workers
        >>> data = torch.utils.data.TensorDataset(torch.arange(4))
        >>> loader = torch.utils.data.DataLoader(data, num_workers=2, worker_init_fn=seed_workers())
    """
    return functools.partial(_seed_worker, world.rank())


def _seed_worker(rank: int, worker: int) -> None:
    # torch has already made it different in each worker and epoch.
    _seed_all(_derived(torch.initial_seed(), rank))


def _checked(name: str, seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, numpy.integer)):
        raise ValueError(f"{name}: seed={seed!r} is {type(seed).__name__}, expected an int")
    if not 0 <= seed < 2**64:
        raise ValueError(f"{name}: seed={seed}, expected 0 to 2**64 - 1")
    return int(seed)


def _of_rank(seed: int, rank: int) -> int:
    return seed if rank == 0 else _derived(seed, rank)


def _derived(seed: int, rank: int) -> int:
    sequence = numpy.random.SeedSequence(seed, spawn_key=(rank,))
    return int(sequence.generate_state(1, numpy.uint64)[0])


def _seed_all(seed: int) -> None:
    random.seed(seed)
    # numpy's takes 32 bits, or several numbers: of the two halves of a seed it would make the very
    # stream that `random` makes of the whole.
    is_small = seed < 2**32
    numpy.random.seed(seed if is_small else numpy.random.SeedSequence(seed).generate_state(4))
    torch.manual_seed(seed)
