"""Checkpointer: a training that is saved and restored goes on bit for bit, on any ranks."""

import gc
import os
import random
import re
import sys
import threading

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite as hvd
from hvdlite.recipes import Checkpointer, DistributedSampler, seeded_generator
from hvdlite.recipes.checkpoint_files import KEY, CheckpointFolder
from tests.harness.programs import run_program


def draw(generator):
    """Numbers from all kinds of generators."""
    made = torch.rand(2, generator=generator).tolist()
    return random.random(), float(numpy.random.rand()), torch.rand(2).tolist(), made


class Training:
    """A small training that draws from all random generators, with an accumulated state in each of
    its objects."""

    def __init__(self, folder, shard=False, share=False, adasum=False, workers=0, **options):
        hvd.init()
        self.adasum = adasum
        torch.manual_seed(hvd.rank())
        random.seed(hvd.rank())
        numpy.random.seed(hvd.rank())
        tied = torch.nn.Linear(4, 4)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), tied, torch.nn.Linear(4, 4))
        if share:
            hvd.share_parameters(self.model)
        else:
            self.model[2].weight = tied.weight
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        adam = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.optimizer = hvd.DistributedOptimizer(
            adam,
            self.model.named_parameters(),
            shard=shard,
            op=hvd.Adasum if adasum else hvd.Average,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        data = TensorDataset(torch.arange(66.0).reshape(22, 3) / 66)
        self.sampler = DistributedSampler(data, seed=5)
        self.generator = seeded_generator(6)
        self.loader = DataLoader(
            data,
            batch_size=2,
            sampler=self.sampler,
            num_workers=workers,
            generator=self.generator,
        )
        self.progress = {"losses": []}
        self.checkpointer = Checkpointer(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            sampler=self.sampler,
            generator=self.generator,
            progress=self.progress,
            **options,
        )

    def steps(self, step, end, saves=()):
        for epoch in range(self.sampler.epoch, 100):
            self.sampler.set_epoch(epoch)
            for (batch,) in self.loader:
                noise = random.random() + float(numpy.random.rand())
                noise += torch.rand((), generator=self.generator).item()
                self.optimizer.zero_grad()
                output = torch.nn.functional.dropout(self.model(batch), 0.3)
                loss = (output * noise).square().mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.sampler.advance(len(batch))
                self.progress["losses"].append(loss.item())
                step += 1
                if step in saves:
                    self.checkpointer.save(step)
                if step == end:
                    return self.state()
        raise AssertionError

    def state(self):
        """All that must be equal: of this rank; of the optimizer on rank 0, with Adasum of each."""
        optimizer = self.optimizer.state_dict() if self.adasum else self.optimizer.full_state_dict()
        return {
            "model": {name: t.tolist() for name, t in self.model.state_dict().items()},
            "optimizer": repr(optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "losses": list(self.progress["losses"]),
            "next": draw(self.generator),
        }


def run_through(folder, begin, end, **options):
    """Steps to `end`, from a restored `begin` if there is one; the state there."""
    training = Training(folder, **options)
    restored = training.checkpointer.restore()
    assert restored == begin
    state = training.steps(restored or 0, end, saves=(4, 9))
    training.checkpointer.close()
    del training
    gc.collect()  # ends the loader's workers
    if begin is not None and hvd.rank() > 0:
        state["losses"] = state["losses"][begin:]  # those before are rank 0's
    return state


def interrupted_equals_uninterrupted(world, folder, begin, **options):
    """begin: the last step of an epoch is 6 on two ranks."""
    whole = world.run(run_through, str(folder / "whole"), None, 15, **options)
    world.run(run_through, str(folder / "parts"), None, begin, **options)
    parts = world.run(run_through, str(folder / "parts"), begin, 15, **options)
    for rank, state in enumerate(whole):
        if rank > 0:
            state["losses"] = state["losses"][begin:]
    assert parts == whole


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard": True},
        {"adasum": True},
        pytest.param({"share": True}, id="shared parameters"),
        pytest.param({"workers": 2}, marks=pytest.mark.wide),
        pytest.param({"background": False}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_a_training_restored_in_mid_epoch_goes_on_bit_for_bit(world, tmp_path, options):
    interrupted_equals_uninterrupted(world, tmp_path, 9, **options)


def without_the_last_rank(folder):
    """Rank 0 changes the checkpoint to one of a world without the last rank."""
    if hvd.rank() == 0:
        path = f"{folder}/checkpoint-000000001.pt"
        tree = torch.load(path, weights_only=True)
        tree[KEY]["generators"].pop()
        tree[KEY]["of_ranks"].pop()
        torch.save(tree, path)


def restored_with_one_rank_more(folder, seeds):
    """What all ranks draw before a checkpoint of a world without the last of them, and after."""
    hvd.init()
    seed = seeds[hvd.rank()]
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    with Checkpointer(folder, generator=generator) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        before = draw(generator)
        without_the_last_rank(folder)
        checkpointer.restore()
        first = draw(generator)
        checkpointer.restore()
        assert draw(generator) == first
    return before, first


@pytest.mark.ranks(3)
@pytest.mark.parametrize("alike", [False, True], ids=["different seeds", "one seed"])
def test_old_ranks_get_their_generators_and_a_new_one_is_seeded_as_the_others_are(
    world, tmp_path, alike
):
    seeds = [7, 7, 8] if alike else [7, 8, 9]
    drawn = world.run(restored_with_one_rank_more, str(tmp_path), seeds)
    for before, after in drawn[:2]:
        assert after == before
    new = drawn[2][1]
    if alike:
        assert new == drawn[0][1]
    else:
        assert all(new[kind] != after[kind] for _, after in drawn[:2] for kind in range(4))
        assert new != drawn[2][0]


def states_of_this_rank():
    """Of all forms: also of unequal lengths, of different dtypes, in another order in memory."""
    rank = hvd.rank()
    return {
        "momentum_buffer": torch.arange(6.0).reshape(3, 2).t() + 10 * rank,
        "flags": torch.arange(rank + 1) % 2 == 0,
        "large": torch.full((2,), 2**40 + rank) if rank else torch.tensor(0.5).double(),
        "name": f"rank {rank}",
    }


def own_states_restored_with_one_rank_more(folder):
    hvd.init()
    optimizer = torch.optim.SGD([torch.zeros(2, 3, requires_grad=True)], lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** hvd.rank())
    (param,) = optimizer.param_groups[0]["params"]
    before = optimizer.state[param] = states_of_this_rank()
    with Checkpointer(folder, optimizer=optimizer, scaler=scaler) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        without_the_last_rank(folder)
        optimizer.state.clear()
        scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
        checkpointer.restore()
    after = optimizer.state[param]
    assert after["momentum_buffer"].stride() == before["momentum_buffer"].stride()
    return plain(before), plain(after), scaler.get_scale()


def plain(state):
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


@pytest.mark.ranks(3)
def test_with_adasum_each_rank_gets_its_own_state_and_a_new_one_that_of_an_old_one(world, tmp_path):
    befores, afters, scales = zip(
        *world.run(own_states_restored_with_one_rank_more, str(tmp_path)), strict=True
    )
    assert afters == (befores[0], befores[1], befores[0])
    assert scales == (1.0, 2.0, 1.0)


def fail(operation):
    """The text of what it raises on this rank."""
    with pytest.raises((ValueError, OSError, RuntimeError)) as raised:
        operation()
    return f"{type(raised.value).__name__}: {raised.value}"


def failures(folder):
    hvd.init()
    is_first = hvd.rank() == 0
    model = torch.nn.Linear(2, 1)
    checkpointer = Checkpointer(folder, model=model, progress={})
    texts = {
        "keep": fail(lambda: Checkpointer(folder, keep=0)),
        "object": fail(lambda: Checkpointer(folder, epoch=3)),
        "names": fail(lambda: Checkpointer(folder, **({} if is_first else {"model": model}))),
        "folder": fail(lambda: Checkpointer("/dev/null/folder")),
        "step": fail(lambda: checkpointer.save(5 + hvd.rank())),
        "negative": fail(lambda: checkpointer.save(-1)),
    }
    checkpointer._objects["progress"]["best"] = threading.Lock if is_first else 1
    texts["unreadable"] = fail(lambda: checkpointer.save(5))
    checkpointer._objects["progress"].clear()
    assert checkpointer.restore() is None
    checkpointer.save(5)
    texts["earlier"] = fail(lambda: checkpointer.save(4))
    checkpointer.close()
    texts["closed"] = fail(lambda: checkpointer.save(6))
    texts["missing"] = fail(Checkpointer(folder, model=model, other={}).restore)
    later = f"{folder}/checkpoint-000000009.pt"
    if is_first:
        torch.save({KEY: {"version": 9, "step": 9}}, later)
    texts["later format"] = fail(Checkpointer(folder, model=model).restore)
    if is_first:
        os.remove(later)
    assert Checkpointer(folder, model=model).restore() == 5
    return texts


@pytest.mark.ranks(2)
def test_what_goes_wrong_on_one_rank_is_an_error_on_every_rank_and_the_next_call_works(
    world, tmp_path
):
    first, second = world.run(failures, str(tmp_path))
    expected = {
        "keep": "ValueError: Checkpointer: keep=0, expected at least 1",
        "object": "ValueError: Checkpointer: epoch is a int, .* progress={'epoch': ...}",
        "names": r"HorovodInternalError: Checkpointer: rank 1 has objects \['model'\], rank 0 \[\]",
        "folder": "NotADirectoryError",
        "step": "HorovodInternalError: Checkpointer.save: rank 1 has step 6, rank 0 5",
        "negative": r"ValueError: Checkpointer.save\(-1\)",
        "unreadable": r"ValueError: Checkpointer.save: progress\['best'\] is a builtins\.\w+, ",
        "earlier": "ValueError: Checkpointer.save: step 4 is before checkpoint-000000005.pt",
        "closed": r"ValueError: Checkpointer.save\(6\): it is closed",
        "missing": "ValueError: .* has no state of other, only of model, progress",
        "later format": "CheckpointError: .*000009.pt holds step 9 in version 9 of the format, exp",
    }
    of_rank_0 = "HorovodInternalError: Checkpointer.* failed on rank 0: .*"
    for name, pattern in expected.items():
        assert re.match(pattern, first[name], re.DOTALL), first[name]
        if name in ("folder", "unreadable", "earlier"):
            pattern = of_rank_0 + pattern.removeprefix("ValueError: ")
        assert re.match(pattern, second[name], re.DOTALL), second[name]
    assert first["later format"] == second["later format"]


def saves_while_one_is_written(folder):
    """Changes the model while rank 0 writes; and saves once more meanwhile."""
    hvd.init()
    may_write = threading.Event()
    former = CheckpointFolder.write

    def write(self, step, tree):
        may_write.wait()
        former(self, step, tree)

    CheckpointFolder.write = write
    try:
        weight = torch.nn.Parameter(torch.zeros(1000))
        model = torch.nn.ParameterList([weight])
        with Checkpointer(folder, model=model) as checkpointer:
            for step in (1, 2):
                weight.data.fill_(step)
                checkpointer.save(step)
                weight.data.fill_(-1)
                if step == 1:
                    threading.Timer(0.1, may_write.set).start()
    finally:
        CheckpointFolder.write = former
    files = [f"{folder}/checkpoint-00000000{step}.pt" for step in (1, 2)]
    read = [torch.load(file, weights_only=True)["model"]["0"] for file in files]
    return [set(values.tolist()) for values in read]


@pytest.mark.ranks(1)
def test_a_checkpoint_has_the_state_of_its_save_and_the_next_one_waits_for_it(world, tmp_path):
    assert world.run(saves_while_one_is_written, str(tmp_path)) == [[{1.0}, {2.0}]]


SCRIPT = """
import sys
import torch
import hvdlite as hvd
from hvdlite.recipes import Checkpointer
hvd.init()
checkpointer = Checkpointer(sys.argv[1], model=torch.nn.Linear(1000, 1000))
checkpointer.save(1)
"""


def test_what_is_being_written_when_the_script_ends_is_written(tmp_path):
    run = run_program([sys.executable, "-c", SCRIPT, tmp_path], 60)
    assert run.code == 0, run
    assert "weight" in torch.load(tmp_path / "checkpoint-000000001.pt", weights_only=True)["model"]
