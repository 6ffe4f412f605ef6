"""torch.distributed.pipelining: the ranks have layers one after the other."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleDualPipeV

from tests.distributed.training import in_a_group
from tests.optimizer.models import FEATURES, loss_of

STEPS = 3
MICRO_BATCHES = 8
CPU = torch.device("cpu")
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "breadth first": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zero bubble, V": ScheduleZBVZeroBubble,
    "DualPipe, V": ScheduleDualPipeV,
}


def stages(number):
    torch.manual_seed(8)
    return [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()).double() for _ in range(number)]


@in_a_group
def trains(rank, size, name):
    several = issubclass(SCHEDULES[name], PipelineScheduleMulti)
    number = 2 * size if several else size
    alone, parts = nn.Sequential(*stages(number)), stages(number)
    # In a V the rank that has the first layer also has the last one.
    second = number - 1 - rank if name.endswith("V") else size + rank
    mine = [rank, second] if several else [rank]
    own_stages = [PipelineStage(parts[place], place, number, CPU) for place in mine]
    schedule = SCHEDULES[name](
        own_stages if several else own_stages[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.5)
    optimizer = torch.optim.SGD([p for at in mine for p in parts[at].parameters()], lr=0.5)
    generator = torch.Generator().manual_seed(9)
    for _ in range(STEPS):
        x = torch.randn(8, FEATURES, dtype=torch.float64, generator=generator)
        y = x.cos()
        reference.zero_grad()
        wanted = loss_of(alone, x, y)
        wanted.backward()
        reference.step()
        optimizer.zero_grad()
        losses = []
        if number - 1 in mine:
            schedule.step(*([x] if rank == 0 else []), target=y, losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean(), wanted, rtol=1e-9, atol=1e-12)
        else:
            schedule.step(*([x] if rank == 0 else []))
        optimizer.step()
    for place in mine:
        for p, q in zip(parts[place].parameters(), alone[place].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2, 4)
@pytest.mark.wide_in(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_trains_as_one_process(world, tmp_path, schedule):
    world.run(trains, tmp_path, schedule)
