"""A sampler that goes on in the middle of an epoch, also with another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchSampler

from hvdlite.world import world

Sample = TypeVar("Sample", covariant=True)


class DistributedSampler(TorchSampler[Sample]):
    """`torch.utils.data.DistributedSampler` that can be saved and restored in the middle of an
    epoch: then no sample comes twice in the epoch, and none is left out, with any number of ranks.

    Replaces torch's class, and is an instance of it: the same arguments, the same samples on every
    rank. The samples of an epoch have one global order, a permutation that follows from
    `seed + epoch` alone. Rank r of n takes each n-th sample of it, from the r-th on. So after k
    batches of b samples on each rank, the first n*k*b of the order are consumed: this number, the
    cursor, is all that must be saved. A resumed epoch distributes the rest of the order in the same
    way.

    A DataLoader fetches ahead of the training loop, so the sampler can't know by itself what the
    loop has consumed: call `advance` after each batch. Without it the sampler works like torch's,
    and refuses to be saved. A state saved after the last batch is that of the epoch's end, where a
    resumed loop finds no batch: call `set_epoch(epoch + 1)` before the save.

    No method communicates. All ranks call `set_epoch` and `advance` in the same way, and load the
    same state.

    Args:
        dataset: Something with a length.
        num_replicas: The number of ranks; None: `hvd.size()`.
        rank: This one; None: `hvd.rank()`.
        shuffle: Whether the order is a permutation, or that of the dataset.
        seed: The same on every rank.
        drop_last: Leaves out the last samples, less than one for each rank. By default some samples
            of the epoch's beginning come again there, so that each rank has equally many.
        even: False: each sample comes exactly once, so that the first ranks may have one more than
            the others: for `optimizer.set_weight` and `hvd.join`, and for validation.

    Raises:
        ValueError: A rank that does not exist; drop_last with even=False; hvdlite is not
            initialized and num_replicas or rank is not given.

    Example:
        >>> images = torch.utils.data.TensorDataset(torch.arange(10))
        >>> sampler = DistributedSampler(images)
        >>> loader = torch.utils.data.DataLoader(images, batch_size=4, sampler=sampler)
        >>> for epoch in range(sampler.epoch, 2):  # after restore(), the epoch that was under way
        ...     sampler.set_epoch(epoch)
        ...     for (batch,) in loader:
        ...         sampler.advance(len(batch))  # after the training step
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        even: bool = True,
    ) -> None:
        replicas = world.size() if num_replicas is None else num_replicas
        own = world.rank() if rank is None else rank
        if not 0 <= own < replicas:
            raise ValueError(
                f"DistributedSampler: rank {own} is not one of {replicas} ranks; give a rank from "
                f"0 to {replicas - 1}, or neither rank nor num_replicas"
            )
        if drop_last and not even:
            raise ValueError(
                "DistributedSampler: drop_last leaves samples out, and even=False deals out each "
                "of them; choose one"
            )
        super().__init__(dataset, replicas, own, shuffle, seed, drop_last)
        self.even = even
        self._length = len(dataset)  # type: ignore[arg-type]
        if not even:
            self.num_samples = len(range(own, self._length, replicas))
            self.total_size = self._length
        # How many samples of the global order are consumed.
        self._cursor = 0
        self._pass: _Pass | None = None
        # Whether the script says what it consumes, and which epoch it is in.
        self._is_told = False
        self._counts_epochs = False
        self._before_next_pass: Callable[[], None] | None = None

    @property
    def cursor(self) -> int:
        """How many samples of the epoch's global order all ranks have consumed."""
        return self._cursor

    def __len__(self) -> int:
        """The number of this rank's samples in a whole epoch, also in one that was resumed."""
        return self.num_samples

    def __iter__(self) -> Iterator[Sample]:
        """This rank's samples from the cursor on; all of them again once the epoch is over.

        With `set_epoch` it is over when all its samples are consumed: an iteration after a `break`
        goes on, however far a DataLoader had fetched ahead. Without it, when all were given out.
        """
        action, self._before_next_pass = self._before_next_pass, None
        if action is not None:
            action()
        if self._is_over():
            self._cursor = 0
        this = self._pass = _Pass(self._cursor)
        indices = self._share(self._cursor)
        this.length = len(indices)
        for index in indices:
            this.given += 1
            yield index
        this.is_over = True

    def _is_over(self) -> bool:
        """Whether the next iteration begins the epoch anew."""
        if self._pass is None:
            return False
        if self._counts_epochs:
            return self._cursor >= self._length
        # Not by the cursor: a script that never says `set_epoch` would not get out of an epoch
        # whose last samples its DataLoader drops.
        return self._pass.is_over

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the samples. A new epoch begins at its first sample; the same one
        continues at the cursor."""
        self._counts_epochs = True
        if epoch != self.epoch:
            super().set_epoch(epoch)
            self._cursor, self._pass = 0, None
            self._before_next_pass = None

    def advance(self, samples: int) -> None:
        """Records that this rank has trained on this many more samples, and all others on as many,
        except for the epoch's last ones. Call it once per batch, after the step; with accumulation
        of gradients, after each backward.

        Args:
            samples: The length of this rank's batch.

        Raises:
            ValueError: Negative, or more than the DataLoader has got.
        """
        given = 0 if self._pass is None else self._pass.given - self._pass.consumed
        if not 0 <= samples <= given:
            raise ValueError(
                f"DistributedSampler.advance({samples}) on rank {self.rank}: of epoch {self.epoch} "
                f"the DataLoader has got {given} samples on this rank that are not counted yet; "
                "pass the length of this rank's batch, once per batch and before set_epoch"
            )
        self._is_told = True
        if self._pass is not None:
            self._pass.consumed += samples
            consumed = self._pass.begin + self.num_replicas * self._pass.consumed
            is_all = self._pass.consumed == self._pass.length
            self._cursor = self._length if is_all else min(consumed, self._length)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch is: plain numbers by name. The state of rank 0 is that of all ranks.

        Raises:
            ValueError: Samples were given out, and `advance` was never called.
        """
        if not self._is_told and self._pass is not None and self._pass.given:
            raise ValueError(
                f"DistributedSampler.state_dict: the DataLoader has got {self._pass.given} samples "
                f"of epoch {self.epoch} on rank {self.rank}, and nothing says how many of them the "
                "training has consumed; call sampler.advance(len(batch)) after each step "
                "(advance(0) says none)"
            )
        # A script that does not count epochs goes on with the next one.
        is_over = self._cursor >= self._length and not self._counts_epochs
        return {
            "epoch": self.epoch,
            "cursor": 0 if is_over else self._cursor,
            "length": self._length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "counts_epochs": self._counts_epochs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where the epoch was. Load the same state on every rank; the number of ranks may
        be another one. `epoch` is that epoch then.

        Raises:
            ValueError: The state is of another dataset, seed or shuffle: the order was another one.
        """
        for name, here in (
            ("length", self._length),
            ("seed", self.seed),
            ("shuffle", self.shuffle),
        ):
            if state[name] != here:
                raise ValueError(
                    f"DistributedSampler.load_state_dict: {name} was {state[name]} when this was "
                    f"saved, and is {here} now, so that the samples have another order; make it "
                    "what it was, or begin a new epoch with a new sampler"
                )
        super().set_epoch(state["epoch"])
        self._counts_epochs = state["counts_epochs"]
        self._cursor, self._pass = state["cursor"], None
        self._before_next_pass = None

    def before_next_pass(self, action: Callable[[], None]) -> None:
        """Runs `action` once, when the next iteration takes its first sample, if that is one of
        this epoch: another `set_epoch`, or another state, takes it back."""
        self._before_next_pass = action

    def _share(self, begin: int) -> list[Any]:
        """This rank's samples of those from `begin` on in the global order."""
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)  # as torch's sampler does
            order = torch.randperm(self._length, generator=generator)
        else:
            order = torch.arange(self._length)
        rest = self._length - begin
        if not self.even:
            first = min(begin + self.rank, self._length)
            places = torch.arange(first, self._length, self.num_replicas)
        else:
            each = rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)
            places = begin + self.rank + self.num_replicas * torch.arange(each)
            places %= max(self._length, 1)  # beyond the end those of the beginning come again
        return order[places].tolist()


# What the class is called where it replaces a sampler that loses its place with the ranks.
ElasticDistributedSampler = DistributedSampler


class _Pass:
    """One iteration: where in the global order it began, and how many of this rank's samples it
    has, has given out, and the training has consumed."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.length = 0
        self.given = 0
        self.consumed = 0
        self.is_over = False
