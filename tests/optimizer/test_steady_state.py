"""A step after the first ones starts plans, and ranks negotiate nothing."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.buckets.layout import Item, assign
from hvdlite.world import world as worlds
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import sgd

ELEMS = [1 + 37 * index % 1000 for index in range(200)]
BUCKET_BYTES, FIRST_BUCKET_BYTES = 20_000, 1_000
KNOBS = {
    "HVDLITE_BUCKET_BYTES": str(BUCKET_BYTES),
    "HVDLITE_FIRST_BUCKET_BYTES": str(FIRST_BUCKET_BYTES),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.fp16}, {"groups": 7}])
@on_ranks(2, hosts=("1,1", "2,1"), knobs=KNOBS)
def test_a_step_runs_one_plan_for_each_bucket_and_sends_no_control_message(options, weighted):
    items = [Item(elems, 4, "") for elems in reversed(ELEMS)]
    buckets = options.get("groups", len(assign(items, BUCKET_BYTES, FIRST_BUCKET_BYTES)))
    assert buckets > 5
    params = [nn.Parameter(torch.ones(elems)) for elems in ELEMS]
    optimizer = sgd(params, lr=0.0, **options)
    engine = worlds.current().team.engine
    exchanged = 0
    for step in range(7):
        before = engine.counters()
        # Some of them get no gradient on some ranks, and the last one none at all.
        used = [p for i, p in enumerate(params[:-1]) if (i + step + hvd.rank()) % 7]
        if weighted:
            optimizer.set_weight((step + hvd.rank()) / 10)
        sum(p.sum() for p in used).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        # A message that is still on its way to be sent is counted too.
        after = engine.counters()
        # With what the first step has shown, buckets may be made anew, and that may end in the
        # second.
        if step >= 2:
            assert after["operations"] - before["operations"] == buckets
            assert after["control_messages"] == before["control_messages"]
            exchanged += after["data_messages"] - before["data_messages"]
    if hvd.rank() == 0:
        assert bool(exchanged) == (hvd.cross_size() > 1), "the hosts did exchange something"
