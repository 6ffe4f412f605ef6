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
from hvdlite.optimizer.overlap import in_flight, watched_parameters
from tests.harness.on_ranks import on_ranks
from tests.harness.programs import run_program
from tests.harness.worlds import mpiexec_command, python_of
from tests.optimizer.models import ONE_BY_ONE
from tests.optimizer.sharding.alike import wrapped
from tests.optimizer.sharding.late import Late, sgd
from tests.optimizer.sharding.models import SMALL_BUCKETS, batch, loss_of, odd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


@on_ranks(knobs=SMALL_BUCKETS)
def test_an_interrupted_wait_can_be_repeated():
    late = Late()
    late.backward(1)

    def interrupt():
        former = signal.signal(signal.SIGALRM, signal.default_int_handler)
        # The others come after this, so the wait can't end before.
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            late.net(batch(2))
        signal.signal(signal.SIGALRM, former)

    late.step(interrupt)
    late.compare()
    hvd.barrier()


@on_ranks(knobs=SMALL_BUCKETS)
def test_a_rank_that_leaves_is_an_error_in_the_forward_of_the_others_and_a_new_world_trains():
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
    late.compare()
    hvd.barrier()


@pytest.mark.parametrize("end", ["deleted", "replaced", "shutdown"])
@on_ranks(knobs=SMALL_BUCKETS)
def test_no_parameters_are_in_flight_when_the_optimizer_or_the_world_has_ended(end):
    late = Late()
    late.backward(1)
    late.step()
    if end == "deleted":
        alive = weakref.ref(late.cut)
        late.cut = late.both = None
        gc.collect()
        assert alive() is None
    elif end == "replaced":
        late.cut = wrapped(sgd, late.net, shard=True, overlap_forward=late.net)
    else:
        hvd.shutdown()
    assert not late.held_differ()
    assert not in_flight.by_param
    if hvd.is_initialized():
        hvd.barrier()


@pytest.mark.parametrize("how", ["list", "other model", "script", "hook"])
@on_ranks(knobs=ONE_BY_ONE)
def test_a_step_waits_for_what_may_be_read_otherwise_than_through_the_model(how):
    net = odd()
    model, held = net, list(net.parameters())
    blocked = set(held)
    if how == "list":
        net.kept = held
    elif how == "other model":
        model = net.end
        blocked -= set(net.end.parameters())
    elif how == "script":
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            net.end = torch.jit.script(net.end)
        blocked = set(net.end.parameters())
    optimizer = wrapped(sgd, net, shard=True, overlap_forward=model)
    if how == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
        in_flight_now = set(in_flight.by_param)
        assert in_flight_now.isdisjoint(map(id, blocked))
        assert bool(in_flight_now) == (how in ("script", "other model"))
        optimizer.zero_grad()
    hvd.barrier()


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 40), nn.Linear(40, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def rows(step):
    generator = torch.Generator().manual_seed(1000 * hvd.rank() + step)
    return torch.randn(6, 5, generator=generator)


def compiled(net, in_place):
    if in_place:
        net.compile(backend="eager", fullgraph=True)
        return net
    return torch.compile(net, backend="eager", fullgraph=True)


# One test, as each rank imports the compiler.
@on_ranks(knobs=SMALL_BUCKETS)
def test_a_model_compiled_before_or_after_or_in_place_gets_whole_parameters():
    for when in ("after", "before", "in place"):
        torch.manual_seed(1)
        net = TwoLayers()
        if when != "after":
            model = compiled(net, when == "in place")
            model(torch.ones(3, 5))
        late = Late(net, rows)
        if when == "after":
            model = compiled(net, in_place=False)
        late.backward(1)
        if watched_parameters.is_compiled:
            late.cut.step()
            assert not late.held_differ()
        else:
            late.step()
        for count in (3, 4, 5):  # some of which get a graph of their own
            x = rows(9)[:count]
            assert torch.equal(model(x), late.alone(x))
        assert watched_parameters.is_compiled
        late.backward(2)
        late.cut.step()
        assert not in_flight.by_param
        assert not late.held_differ()
        # Of this process, which runs other tests.
        watched_parameters.is_compiled = False
        torch._dynamo.reset()
        hvd.barrier()


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
