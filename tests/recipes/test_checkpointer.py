"""Checkpointer: a training that is saved and restored goes on bit for bit, on any ranks."""

import gc
import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite as hvd
from hvdlite.recipes import Checkpointer, DistributedSampler


class Training:
    """A small training that draws from all random generators, with an accumulated state in each of
    its objects."""

    def __init__(self, folder, shard=False, share=False, workers=0, **options):
        hvd.init()
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
            adam, self.model.named_parameters(), **({"shard": True} if shard else {})
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        data = TensorDataset(torch.arange(66.0).reshape(22, 3) / 66)
        self.sampler = DistributedSampler(data, seed=5)
        self.loader = DataLoader(data, batch_size=2, sampler=self.sampler, num_workers=workers)
        self.progress = {"losses": []}
        self.checkpointer = Checkpointer(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            sampler=self.sampler,
            progress=self.progress,
            **options,
        )

    def steps(self, step, end, saves=()):
        for epoch in range(self.sampler.epoch, 100):
            self.sampler.set_epoch(epoch)
            for (batch,) in self.loader:
                noise = random.random() + float(numpy.random.rand())
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
        """All that must be equal: of this rank; of the optimizer on rank 0."""
        return {
            "model": {name: t.tolist() for name, t in self.model.state_dict().items()},
            "optimizer": repr(self.optimizer.full_state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "losses": list(self.progress["losses"]),
            "next": (random.random(), float(numpy.random.rand()), torch.rand(2).tolist()),
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
        pytest.param({"share": True}, id="shared parameters"),
        pytest.param({"workers": 2}, marks=pytest.mark.wide),
        pytest.param({"background": False}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_a_training_restored_in_mid_epoch_goes_on_bit_for_bit(world, tmp_path, options):
    interrupted_equals_uninterrupted(world, tmp_path, 9, **options)
