"""torch.compile of what calls torch.distributed. Each case starts a C++ compiler."""

import contextlib
import importlib
import shutil
import warnings

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.training import in_a_group, sgd, step
from tests.harness.needs import lacking
from tests.optimizer.models import assert_same_parameters, batches, model, own

COMPILING_S = 240.0


@pytest.fixture(autouse=True)
def _a_compiler():
    if not shutil.which("g++"):
        lacking("no g++")


@contextlib.contextmanager
def no_warnings():
    """torch's compiler warns of its own use of torch.jit. It compiles in this process, without
    processes of its own, which would outlive the case."""
    inductor = importlib.import_module("torch._inductor.config")  # takes long
    inductor.compile_threads = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@in_a_group
def trains_compiled(rank, size):
    with no_warnings():
        alone, net = model(), torch.compile(DistributedDataParallel(model()))
    reference, optimizer = sgd(alone), sgd(net)
    with no_warnings():
        for x, y in batches(4, 4, size):
            step(alone, reference, x, y)
            step(net, optimizer, own(x, rank, size), own(y, rank, size))
    assert_same_parameters(net.module, alone)


@pytest.mark.wide
@pytest.mark.breaks_the_world  # the compiler leaves threads
@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
def test_a_compiled_ddp_model_trains_as_one_process(world, tmp_path):
    world.run(trains_compiled, tmp_path, limit_s=COMPILING_S)
    world.end()


@in_a_group
def computes_compiled(rank, size):
    def work(x):
        total = functional.all_reduce(x * 2, "sum", list(range(size)))
        parts = functional.all_gather_tensor(x + 1, 0, list(range(size)))
        share = functional.reduce_scatter_tensor(parts, "sum", 0, list(range(size)))
        return total.relu(), parts - 1, share / size

    x = torch.arange(4.0) + rank
    with no_warnings():
        total, parts, share = torch.compile(work, fullgraph=True)(x)
    everyone = [torch.arange(4.0) + other for other in range(size)]
    torch.testing.assert_close(total, 2 * sum(everyone))
    torch.testing.assert_close(parts, torch.cat(everyone))
    torch.testing.assert_close(share, x + 1)


@pytest.mark.wide
@pytest.mark.breaks_the_world  # the compiler leaves threads
@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
def test_compiled_functional_collectives_give_what_eager_ones_do(world, tmp_path):
    world.run(computes_compiled, tmp_path, limit_s=COMPILING_S)
    world.end()
