"""A step after the first ones starts plans, and ranks negotiate nothing."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.buckets.layout import Item, assign
from hvdlite.world import world as worlds

PARAMETERS = 200
BUCKET_BYTES, FIRST_BUCKET_BYTES = 20_000, 1_000


def elements(index):
    return 1 + 37 * index % 1000


def counted(options):
    """What the engine has counted in each of some steps, after the first two: with what the first
    has shown, buckets may be made anew, and their making may end in the second."""
    hvd.init()
    rank = hvd.rank()
    params = [nn.Parameter(torch.ones(elements(i))) for i in range(PARAMETERS)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), **options)
    engine = worlds.current().team.engine
    counts = []
    for step in range(7):
        before = engine.counters()
        # Some of them get no gradient on some ranks, and the last one none at all.
        used = [p for i, p in enumerate(params[:-1]) if (i + step + rank) % 7]
        sum(p.sum() for p in used).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        # A message that is still on its way to be sent is counted too.
        after = engine.counters()
        counts.append({name: after[name] - before[name] for name in after})
    return counts[2:]


def buckets():
    items = [Item(elements(i), 4, "") for i in reversed(range(PARAMETERS))]
    return len(assign(items, BUCKET_BYTES, FIRST_BUCKET_BYTES))


KNOBS = {
    "HVDLITE_BUCKET_BYTES": str(BUCKET_BYTES),
    "HVDLITE_FIRST_BUCKET_BYTES": str(FIRST_BUCKET_BYTES),
}
OPTIONS = [{}, {"compression": hvd.Compression.fp16}, {"groups": 7}]
IDS = ["plain", "fp16", "groups"]


@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_a_step_with_200_parameters_sends_no_control_message_between_hosts(world, options):
    for counts in world.run(counted, options, knobs=KNOBS):
        assert [count["control_messages"] for count in counts] == [0] * len(counts)
    sent = world.run(counted, options, knobs=KNOBS)[0]
    assert all(count["data_messages"] > 0 for count in sent), "the hosts did exchange something"


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.mpis("mpich")
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_a_step_runs_one_plan_for_each_bucket_and_nothing_else(world, options):
    expected = options.get("groups", buckets())
    assert expected > 5
    for counts in world.run(counted, options, knobs=KNOBS):
        assert [count["operations"] for count in counts] == [expected] * len(counts)
