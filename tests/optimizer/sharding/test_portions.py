"""What the wrapped optimizer is given at a time: portions of what a rank owns."""

import itertools

import pytest
import torch

from hvdlite.optimizer.sharding import division
from hvdlite.optimizer.sharding.division import ALIGNMENT_ELEMS, Part
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.models import odd, portions_of
from tests.optimizer.sharding.test_bits import trains_alike
from tests.optimizer.sharding.test_checkpoints import sharded

SIZE = 128  # elements of float32


@pytest.mark.parametrize("begin", [0, 64, 100, 1000])
@pytest.mark.parametrize("size", [1, 63, 64, 190, 192, 193, 5000, 5001])
def test_portions_cover_a_part_in_about_equal_sizes_cut_at_multiples_of_64(begin, size):
    param = torch.zeros(begin + size + 7)
    part = Part(1, begin, begin + size)
    with portions_of(SIZE):
        cut = division.portions_of(part, param, {})
    assert [each.index for each in cut] == [1] * len(cut)
    assert [cut[0].begin, cut[-1].end] == [part.begin, part.end]
    for before, after in itertools.pairwise(cut):
        assert before.end == after.begin
        assert after.begin % ALIGNMENT_ELEMS == 0
    assert all(0 < each.end - each.begin < 1.5 * SIZE + ALIGNMENT_ELEMS for each in cut)
    assert len(cut) <= max(round(size / SIZE), 1)
    # A part that is no larger than the caches stays whole, and all that does not gain by it.
    assert division.portions_of(part, param, {"foreach": False}) == [part]
    with portions_of(SIZE):
        assert division.portions_of(part, param, {"foreach": True}) == [part]
        assert division.portions_of(part, param, {"fused": True}) == [part]


@pytest.mark.mpis("mpich")
@pytest.mark.wide_in("2,1")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Adam", (True,)),
        ("Adam", (False, True)),
        ("ASGD", ("host",)),
        ("momentum", (True, False, "bfloat16")),
    ],
)
@on_ranks(2, hosts=("2,1",))
def test_a_step_in_portions_has_the_bits_of_the_unsharded_one(name, arguments):
    with portions_of(SIZE):
        trains_alike(name, *arguments)


@pytest.mark.mpis("mpich")
@on_ranks(2)
def test_state_is_kept_by_portions_and_sharded_grad_gives_all_of_a_part():
    net = odd()
    optimizer = sharded("AdamW", net)
    with portions_of(SIZE):
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(4, 3, 6, 6)).square().mean().backward()
            optimizer.synchronize()
            found = {name: optimizer.sharded_grad(p) for name, p in net.named_parameters()}
            with optimizer.skip_synchronize():
                optimizer.step()
    assert all(len(parts) <= 1 for parts in found.values())
    (part,) = found["mix.weight"]
    keys = [key for key in optimizer.state if key.data_ptr() >= net.mix.weight.data_ptr()]
    size = part.end - part.begin
    assert size > 10 * SIZE
    own = [key.numel() for key in keys if key.data_ptr() < net.mix.weight[-1, -1:].data_ptr()]
    assert sum(own) == size
    assert max(own) < 2 * SIZE
