"""Checkpointer: saves a training and goes on with it."""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import Any

import torch

from hvdlite.collectives.objects import gather_results
from hvdlite.errors import HorovodInternalError
from hvdlite.recipes import generator_states, rank_states
from hvdlite.recipes.checkpoint_files import (
    KEY,
    VERSION,
    BackgroundWriter,
    CheckpointError,
    CheckpointFolder,
    name_of,
)
from hvdlite.recipes.samplers import DistributedSampler
from hvdlite.recipes.state_trees import Copier, places_of, with_tensors, without_tensors
from hvdlite.state import broadcast_parameters, load_optimizer_state
from hvdlite.world import world
from hvdlite.world.teams.process_sets import global_process_set
from hvdlite.world.telling.logs import log

# In what the file holds under KEY: by rank, from rank 1 on, the states that each has for itself.
OF_RANKS = "of_ranks"


class Checkpointer:
    """Saves a training in a folder, so that it can continue bit for bit.

    A checkpoint holds the states of the objects given here, the random generators of every rank
    (python's, NumPy's, torch's, the GPUs'), and the number of the step. Rank 0 alone needs the
    folder and broadcasts everything to the others.

    A file, `checkpoint-000001200.pt` for step 1200, appears when it is complete: it is written
    under another name, synced to the disk and renamed. It is a file of `torch.save`:
    `torch.load(file, weights_only=True)["model"]` reads it anywhere. `restore` reads with
    weights_only, so no file can run code; `save` refuses what `restore` could not read.

    Every rank makes one, with the same arguments, and calls its methods, in the same order as other
    collectives. The constructor and `save` block briefly, `restore` until every rank has its state.
    Only one job at a time may use a folder.

    Args:
        folder: Created if it is missing. Neither in it nor on the way to it is a symlink of another
            user followed.
        keep: How many checkpoints to keep; the oldest are removed when a new one is complete. None:
            all.
        background: Rank 0 writes in a thread while the training goes on; False: inside `save`.
        **objects: What to save, by name: the model, its optimizer (distributed, sharded or not),
            schedulers, a GradScaler, a DistributedSampler of hvdlite, anything with `state_dict`
            and `load_state_dict`; a torch.Generator, such as a DataLoader's; or a dict with your
            own values, which `restore` changes in place. Their states are rank 0's, without
            differences between ranks. Of a generator, a GradScaler, and an optimizer with
            op=Adasum, each rank's own state is saved.

    Raises:
        ValueError: keep is less than 1; an object has none of these forms.
        OSError: Rank 0 can't make the folder, or may not use it; there, and elsewhere:
        HorovodInternalError: Another rank has raised, or the ranks' objects differ.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Checkpointer("checkpoints", model=model, optimizer=optimizer) as checkpointer:
        ...     for step in range(checkpointer.restore() or 0, 100):
        ...         optimizer.step()  # and the rest of a training step
        ...         if (step + 1) % 50 == 0:
        ...             checkpointer.save(step + 1)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        background: bool = True,
        **objects: Any,
    ) -> None:
        self._objects = objects
        self._generators = {
            name: each for name, each in objects.items() if isinstance(each, torch.Generator)
        }
        self._background = background
        self._folder = CheckpointFolder(os.fspath(folder), keep)
        self._writer = BackgroundWriter(self._folder)
        self._copier = Copier()
        self._is_closed = False

        def check() -> list[str]:
            _check_arguments(keep, objects)
            if world.rank() == 0:
                self._folder.prepare()
            return sorted(objects)

        names = _gathered("Checkpointer", check)
        _check_alike("Checkpointer", "objects", names)
        # Also where a script forgets to close it.
        weakref.finalize(self, self._writer.wait_at_last)

    def save(self, step: int) -> None:
        """Saves the current states. Every rank calls it, between two steps of the
        optimizer: it does not save gradients that are being accumulated.

        Blocks until rank 0 has copied the states in its memory, and while it still writes the
        previous checkpoint, so that none is left out; waits for all ranks. The first call also
        allocates the memory for the copy, as much as the states have, and keeps it. During the call
        the state of a sharded optimizer is in memory once more, gathered. With op=Adasum rank 0
        holds the states of all ranks while it writes them.

        Args:
            step: The number of the checkpoint, the same on every rank: how many steps were made.
                The latest one is what `restore` takes. The same number again replaces the file.

        Raises:
            CheckpointError: On rank 0, the checkpoint before could not be written. Nothing is saved
                now; the next call tries again.
            ValueError: On rank 0, the folder has later checkpoints; or a state has something that
                could not be read again.
            HorovodInternalError: On every other rank then. Or the ranks' steps differ; on every
                rank.
        """
        if self._is_closed:
            raise ValueError(f"Checkpointer.save({step}): it is closed")
        collected = {
            name: each.full_state_dict()
            for name, each in self._objects.items()
            if hasattr(each, "full_state_dict") and name not in self._own_names()
        }
        snapshot: dict[str, Any] = {}
        tensors: list[torch.Tensor] = []  # of the states that this rank has for itself

        def look() -> tuple[int, dict[str, Any], Any]:
            number = _checked_step(step)
            own: Any = {}
            if world.rank() == 0:
                self._writer.wait()
                self._folder.check_next(number)
                states = {
                    name: collected[name] if name in collected else _state_of(each)
                    for name, each in self._objects.items()
                }
                snapshot.update(self._copier.copy(states))
            else:
                states = {name: _state_of(self._objects[name]) for name in self._own_names()}
                own, found = without_tensors(Copier().copy(states))
                tensors.extend(found)
            return number, generator_states.captured(self._generators), own

        everyones = _gathered("Checkpointer.save", look)
        _check_alike("Checkpointer.save", "step", [number for number, _, _ in everyones])
        frames = [own for _, _, own in everyones]
        of_ranks = rank_states.to_rank_0("Checkpointer.save", frames, tensors)
        if world.rank() == 0:
            number = everyones[0][0]
            about = {
                "version": VERSION,
                "step": number,
                "generators": [states for _, states, _ in everyones],
                OF_RANKS: of_ranks[1:],
            }
            self._writer.start(number, {**snapshot, KEY: about})
            if not self._background:
                self._writer.wait()

    def restore(self) -> int | None:
        """Loads the latest intact checkpoint on every rank. Every rank calls it, before the
        training and after the objects are made. Blocks. During the call every rank has the whole
        checkpoint in host memory, also of a sharded optimizer.

        It passes over torn and damaged files, and rank 0 logs which ones and why. A file that can't
        be read but may be intact is an error: with an older one, or none, the training would go
        back, and later saves would remove the file.

        The number of ranks may differ from before: a sampler continues with the same global order
        of samples. Rank r gets the random generators of the former rank r. On a new rank, a
        generator that had the same state on all ranks gets that state; others get a seed from
        their state on rank 0 and the rank's number. Of states that each rank has for itself,
        with op=Adasum, rank r of more than n former ranks gets the state of the former rank r
        mod n; with fewer ranks the others' states are dropped.

        With a DistributedSampler in the middle of an epoch, torch's generator and those given to
        the constructor get their states again when the next iteration begins, because a DataLoader
        draws a number then.

        Returns:
            Its step; None if there is none, and nothing has changed.

        Raises:
            CheckpointError: The disk or a permission keeps rank 0 from reading the folder or a
                file; torch refuses a file whose checksums are right, or it is in a later format;
                the checkpoint before could not be written. The same text on every rank.
            ValueError: The checkpoint lacks the state of an object; and what `load_state_dict`
                raises if a state does not fit.
            HorovodInternalError: Rank 0 has failed otherwise; on every other rank.
        """
        tensors: list[torch.Tensor] = []
        failures: list[CheckpointError] = []  # rank 0's own, with its cause

        own_tensors: list[list[torch.Tensor]] = []  # by rank

        def read() -> tuple[int, Any, list[Any]] | CheckpointError | None:
            if world.rank() != 0:
                return None
            try:
                self._writer.wait()
                newest = self._folder.newest()
            except CheckpointError as error:
                failures.append(error)
                return error
            if newest is None:
                return None
            step, tree = newest
            # A rank that there was not gets those of another one, in turn.
            of_ranks = [{}, *tree[KEY].pop(OF_RANKS, ())]
            frames = []
            for rank in range(world.size()):
                own, found = without_tensors(of_ranks[rank % len(of_ranks)])
                frames.append(own)
                own_tensors.append(found)
            frame, found = without_tensors(tree)
            tensors.extend(found)
            return step, frame, frames

        found = _gathered("Checkpointer.restore", read)[0]
        if isinstance(found, CheckpointError):
            raise failures[0] if failures else found
        if found is None:
            return None
        step, frame, frames = found
        if world.rank() != 0:
            tensors = places_of(frame)
        broadcast_parameters(
            [(f"Checkpointer.{index}", tensor) for index, tensor in enumerate(tensors)], 0
        )
        tree = with_tensors(frame, tensors)
        own = rank_states.from_rank_0("Checkpointer.restore", frames, own_tensors)
        tree |= {name: own[name] for name in own.keys() & self._own_names()}
        self._load(step, tree)
        return int(step)

    def _own_names(self) -> set[str]:
        return {name for name, each in self._objects.items() if rank_states.has_own_state(each)}

    def _load(self, step: int, tree: dict[str, Any]) -> None:
        about = tree.pop(KEY)
        where = f"{self._folder.path}/{name_of(step)}"
        missing = sorted(self._objects.keys() - tree.keys())
        if missing:
            raise ValueError(
                f"Checkpointer.restore: {where} has no state of {', '.join(missing)}, only of "
                f"{', '.join(sorted(tree))}; restore with the objects that it was saved with"
            )
        unused = sorted(tree.keys() - self._objects.keys())
        if unused and world.rank() == 0:
            log.warning("rank 0: %s has states that nothing loads: %s", where, ", ".join(unused))
        # An AsyncOptimizer gives the servers the parameters that are there when it is loaded.
        for name in sorted(tree, key=lambda name: not isinstance(self._objects.get(name), _MODULE)):
            if name in self._objects and name not in self._generators:
                _load_state(self._objects[name], tree[name])
        generator_states.restore(about["generators"], world.rank(), self._generators)
        for each in self._objects.values():
            if isinstance(each, DistributedSampler) and each.cursor:
                each.before_next_pass(generator_states.drawn_again(self._generators))

    def wait(self) -> None:
        """Blocks on rank 0 until the last checkpoint is complete, and returns at once on the other
        ranks. Not collective.

        Raises:
            CheckpointError: It could not be written; on rank 0.
        """
        self._writer.wait()

    def close(self) -> None:
        """`wait`, for the last time: `save` raises an error from now on. Not collective."""
        self._is_closed = True
        self._writer.wait()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        if error is None:
            self._writer.wait()
        else:  # which is not to be hidden
            self._writer.wait_at_last()


_MODULE = torch.nn.Module


def _gathered(operation: str, make: Any) -> list[Any]:
    return gather_results(operation, make, f"hvdlite.{operation}", global_process_set)


def _check_arguments(keep: int | None, objects: dict[str, Any]) -> None:
    if keep is not None and keep < 1:
        raise ValueError(f"Checkpointer: keep={keep}, expected at least 1, or None to keep all")
    if KEY in objects:
        raise ValueError(f"Checkpointer: {KEY!r} is hvdlite's own name; choose another one")
    for name, each in objects.items():
        has_methods = hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
        if not has_methods and not isinstance(each, (dict, torch.Generator)):
            raise ValueError(
                f"Checkpointer: {name} is a {type(each).__name__}, expected something with "
                "state_dict and load_state_dict, a torch.Generator, or a dict; put values of your "
                "own into a dict, "
                f"Checkpointer(..., progress={{{name!r}: ...}})"
            )


def _check_alike(operation: str, what: str, by_rank: list[Any]) -> None:
    for rank, given in enumerate(by_rank):
        if given != by_rank[0]:
            raise HorovodInternalError(
                f"{operation}: rank {rank} has {what} {given}, rank 0 {by_rank[0]}; pass the same "
                "on every rank"
            )


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__") or step.__index__() < 0:
        raise ValueError(f"Checkpointer.save({step!r}): expected a number of steps, 0 or more")
    return int(step.__index__())


def _state_of(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def _load_state(thing: Any, state: Any) -> None:
    if isinstance(thing, torch.optim.Optimizer):
        load_optimizer_state(thing, state)
    elif hasattr(thing, "load_state_dict"):
        thing.load_state_dict(state)
    else:
        thing.clear()
        thing.update(state)
