"""What a rank can ask about its own steps."""

import json

import pytest
import torch

import hvdlite as hvd
from hvdlite.observe import waits
from tests.harness.uncounted import uncounted


@uncounted()
def trained():
    hvd.init()
    found = [hvd.metrics()]
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for batch in torch.utils.data.DataLoader(torch.ones(10, 4), batch_size=2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        found.append(hvd.metrics())
    hvd.shutdown()
    return found


@pytest.mark.ranks(1, 2)
def test_each_rank_learns_where_the_time_of_its_steps_went(world):
    for rank, (before, first, *_, last) in enumerate(world.run(trained)):
        assert json.loads(json.dumps(last)) == last
        for found, steps in ((before, 0), (first, 1), (last, 5)):
            assert (found["rank"], found["size"], found["steps"]) == (rank, world.size, steps)
        assert set(first["last_step"].values()) == {0.0}
        for times, whole in ((last, "seconds"), (last["last_step"], "all")):
            parts = times["computing"], times["data"], times["waited"]
            assert sum(parts) == pytest.approx(times[whole])
            assert min(parts[:2]) > 0
            assert times["waited"] > 0 or world.size == 1
        assert last["last_step"]["all"] < last["seconds"]
        assert 0 <= last["throttled"] <= 1


def test_there_is_nothing_to_ask_before_init():
    with uncounted():
        with pytest.raises(ValueError, match="init"):
            hvd.metrics()
        assert waits._counted is None
