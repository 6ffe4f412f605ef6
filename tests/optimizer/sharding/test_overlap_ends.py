"""With overlap_forward: what else ends the wait for parameters, and what becomes of it if the wait
is interrupted or fails."""

import gc
import signal
import warnings
import weakref

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.overlap import on_the_way, watched_parameters
from tests.harness.programs import run_program
from tests.harness.worlds import mpiexec_command, python_of
from tests.optimizer.sharding.late import Late
from tests.optimizer.sharding.models import SMALL_BUCKETS, batch, differences, odd

ONE_BY_ONE = {"HVDLITE_BUCKET_BYTES": "0", "HVDLITE_FIRST_BUCKET_BYTES": "0"}

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def is_interrupted():
    late = Late()
    late.backward(1)

    def interrupt():
        def handler(*_):
            raise KeyboardInterrupt

        former = signal.signal(signal.SIGALRM, handler)
        # The others come after this, so the wait can't end before.
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            late.net(batch(2))
        signal.signal(signal.SIGALRM, former)

    late.step(interrupt)
    assert differences(late.net, late.alone) == []
    hvd.barrier()


def test_an_interrupted_wait_can_be_repeated(world):
    world.run(is_interrupted, knobs=SMALL_BUCKETS)


def fails():
    late = Late()
    late.backward(1)
    if hvd.rank() == 0:
        late.cut.step()
    hvd.barrier()
    if hvd.rank() == 0:
        for read in (late.net, late.net, late.cut.wait_for_parameters):
            with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
                read(*([batch(2)] if read is late.net else []))
        assert late.cut.zero_grad() is None
    hvd.shutdown()
    # Whatever the parameters are, they can be read, saved and loaded now.
    late.net.load_state_dict(late.alone.state_dict())
    hvd.init()
    late.backward(2)
    late.cut.step()
    assert differences(late.net, late.alone) == []
    hvd.barrier()


def test_a_rank_that_leaves_is_an_error_in_the_forward_of_the_others_and_a_new_world_trains(world):
    world.run(fails, knobs=SMALL_BUCKETS)


def shuts_down():
    late = Late()
    late.backward(1)
    late.step()
    hvd.shutdown()
    assert not late.held_differ()
    assert not on_the_way.by_param


def test_a_shutdown_waits_for_the_parameters(world):
    world.run(shuts_down, knobs=SMALL_BUCKETS)


def is_forgotten(again):
    late = Late()
    late.backward(1)
    late.step()
    if again:
        late.cut = hvd.DistributedOptimizer(
            torch.optim.SGD(late.net.parameters(), lr=0.1), shard=True, overlap_forward=late.net
        )
    else:
        alive = weakref.ref(late.cut)
        late.cut = None
        gc.collect()
        assert alive() is None
    assert not late.held_differ()
    hvd.barrier()


@pytest.mark.parametrize("again", [False, True])
def test_no_parameters_are_on_the_way_when_the_optimizer_is_deleted_or_replaced(world, again):
    world.run(is_forgotten, again, knobs=SMALL_BUCKETS)


def is_read_otherwise(how):
    hvd.init()
    net = odd()
    held = list(net.parameters())
    model, blocked = net, held
    if how == "list":
        net.kept = held
    elif how == "other model":
        model, blocked = net.end, [p for p in held if all(p is not q for q in net.end.parameters())]
    elif how == "script":
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            net.end = torch.jit.script(net.end)
        blocked = list(net.end.parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), shard=True, overlap_forward=model
    )
    if how == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    for step in range(2):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        on_the_way_now = set(on_the_way.by_param)
        assert on_the_way_now.isdisjoint(map(id, blocked))
        assert bool(on_the_way_now) == (how in ("script", "other model"))
        optimizer.zero_grad()
    hvd.barrier()


@pytest.mark.parametrize("how", ["list", "other model", "script", "hook"])
def test_a_step_waits_for_what_may_be_read_otherwise_than_through_the_model(world, how):
    world.run(is_read_otherwise, how, knobs=ONE_BY_ONE)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 40), nn.Linear(40, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def two_layers():
    torch.manual_seed(1)
    return TwoLayers()


def rows(step):
    generator = torch.Generator().manual_seed(1000 * hvd.rank() + step)
    return torch.randn(6, 5, generator=generator)


def is_compiled(when):
    compiled = []

    def compiles(net):
        if when == "in place":
            net.compile(backend="eager", fullgraph=True)
        compiled.append(
            net if when == "in place" else torch.compile(net, backend="eager", fullgraph=True)
        )
        if when != "after":
            compiled[0](torch.ones(3, 5))

    late = Late(make=two_layers, data=rows, prepare=compiles if when != "after" else None)
    if when == "after":
        compiles(late.net)
    late.backward(1)
    if watched_parameters.is_compiled:
        late.cut.step()
        assert not late.held_differ()
    else:
        late.step()
    for count in (3, 4, 5):  # some of which get a graph of their own
        x = rows(9)[:count]
        assert torch.equal(compiled[0](x), late.alone(x))
    assert watched_parameters.is_compiled
    late.backward(2)
    late.cut.step()
    assert not on_the_way.by_param
    assert not late.held_differ()
    # Of this process, which runs other tests.
    watched_parameters.is_compiled = False
    torch._dynamo.reset()
    hvd.barrier()


# One test, as each rank imports the compiler.
def test_a_model_compiled_before_or_after_or_in_place_gets_whole_parameters(world):
    for when in ("after", "before", "in place"):
        world.run(is_compiled, when, knobs=SMALL_BUCKETS)


AT_EXIT = """
import atexit, os, sys, time, torch, hvdlite as hvd
hvd.init()
net = torch.nn.Linear(64, 64)
hvd.broadcast_parameters(net.state_dict(), 0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr=0.1), shard=True, overlap_forward=net
)
for step in range(2):
    net(torch.ones(1, 64)).sum().backward()
    if step == 0 or hvd.rank() == 0:
        optimizer.step()
path = sys.argv[1]
if hvd.rank() == 0:
    # Called first: the exit has begun.
    atexit.register(lambda: open(path, "w").close())
else:
    while not os.path.exists(path):
        time.sleep(0.01)
    time.sleep(0.2)
    optimizer.step()
    optimizer.wait_for_parameters()
    print("whole")
"""


def test_a_rank_whose_program_ends_sends_what_others_need(tmp_path):
    command = [*mpiexec_command("mpich", 2), python_of("mpich"), "-c", AT_EXIT]
    finished = run_program([*command, tmp_path / "ends"], limit_s=60)
    assert (finished.code, finished.stdout) == (0, "whole\n"), finished


def refuses():
    hvd.init()
    net = nn.Linear(2, 2)
    for shard, model, text in (
        (False, net, 'overlap_forward=Linear needs shard=True or shard="host"'),
        (True, nn.Linear(2, 2), "the model has none of the optimizer's 2 parameters"),
        ("host", net.weight, "expected the model, a torch.nn.Module"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters()), shard=shard, overlap_forward=model
            )


def test_another_model_or_no_shard_is_an_error(world):
    world.run(refuses)
