"""What fails, and what the texts say."""

import functools
import logging
import threading

import pytest
import torch

import hvdlite as hvd
from hvdlite.asynchronous.messages import HEADER_BYTES, REQUEST_TAG, Kind
from hvdlite.errors import HorovodInternalError, LaunchError
from hvdlite.world import world as hvd_world
from tests.asynchronous.job import in_a_job, of_workers, servers


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        if any(group["lr"] < 0.5 for group in self.param_groups):
            raise ZeroDivisionError("the learning rate is too small")


class Unbuildable(torch.optim.SGD):
    def __setstate__(self, state):
        raise TypeError("never on a server")


def refuse():
    raise LookupError("no such thing on a server")


class Unreadable:
    """Can be pickled, and not be read."""

    def __reduce__(self):
        return refuse, ()


def expect_failure(case):
    """On a server, what `init` raises counts as a result."""

    @functools.wraps(case)
    def run(*args):
        try:
            return in_a_job(case)(*args)
        except HorovodInternalError as error:
            return f"server: {error}"

    return run


@expect_failure
def steps_until_it_fails():
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.AsyncOptimizer(Failing(model.parameters(), lr=1.0), max_staleness=1)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0]["lr"] = 0.1
        model(torch.ones(1, 2)).sum().backward()
        try:
            optimizer.step()
            optimizer.pull()
        except HorovodInternalError as error:
            return str(error)
    return None


@pytest.mark.ranks(3)
def test_an_optimizer_that_fails_on_a_server_fails_every_worker(world):
    results = world.run(steps_until_it_fails, knobs=servers(1))
    for text in results:
        assert "server 0 (rank 2 of the job, on " in text
        assert "failed: ZeroDivisionError: the learning rate is too small" in text


@expect_failure
def sends_nonsense(what):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD([param], lr=1.0), max_staleness=1)
    link = optimizer._hvdlite_worker.links[0]
    hvd.barrier()
    if hvd.rank() == 1:
        if what == "options":
            link._request(Kind.OPTIONS, Unreadable())
        else:
            engine = hvd_world.current().everyone.team.engine
            size = 3 if what == "size" else HEADER_BYTES
            engine.send(torch.zeros(size, dtype=torch.uint8), link.server, REQUEST_TAG)
    param.grad = torch.ones(2)
    try:
        while True:
            optimizer.step()
            optimizer.pull()
    except HorovodInternalError as error:
        return str(error)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("size", "the sender's tensor has 3 bytes, the receiver's 64"),
        ("header", "BadMessage: a header that is none, where one of worker 1 was expected"),
        ("options", "LookupError: no such thing on a server"),
    ],
)
def test_what_a_server_can_not_receive_is_told_to_every_worker(world, what, text):
    for found in world.run(sends_nonsense, what, knobs=servers(1)):
        assert "server 0 (rank 2 of the job, on " in found
        assert "failed: receiving from worker 1 (on " in found
        assert text in found


@in_a_job
def cannot_be_set_up(what):
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]  # one on each server
    optimizer = torch.optim.SGD(params, lr=1.0)
    good = torch.optim.SGD(params, lr=1.0)
    if what == "class":
        optimizer = Unbuildable(params, lr=1.0)
    elif what == "attribute":
        optimizer.thing = Unreadable()
    elif what == "state":
        optimizer.state[params[1]]["thing"] = Unreadable()
    with pytest.raises(HorovodInternalError) as caught:
        hvd.AsyncOptimizer(optimizer)
    # The job goes on.
    optimizer = hvd.AsyncOptimizer(good)
    optimizer.pull()
    return str(caught.value)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("what", "servers_", "error"),
    [
        ("class", (0, 1), "TypeError: never on a server"),
        ("attribute", (0, 1), "LookupError: no such thing on a server"),
        ("state", (1,), "LookupError: no such thing on a server"),
    ],
)
def test_an_optimizer_that_a_server_can_not_have_is_an_error_on_every_worker(
    world, what, servers_, error
):
    for text in of_workers(world.run(cannot_be_set_up, what, knobs=servers(2))):
        assert "the servers can't take the optimizer: server " in text
        for server in (0, 1):
            named = f"server {server} (rank {2 + server} of the job, on "
            assert (named in text) == (server in servers_)
        assert text.count(error) == len(servers_)


@in_a_job
def cannot_be_loaded():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD([param], lr=1.0), max_staleness=1)
    saved = optimizer.state_dict()
    param.data.zero_()
    with pytest.raises(HorovodInternalError) as caught:
        optimizer.load_state_dict({**saved, "state": {0: {"thing": Unreadable()}}})
    with pytest.raises(ValueError, match="load_state_dict: rank 0's state dict has no 'param_gro"):
        optimizer.load_state_dict({})
    optimizer.pull()
    return str(caught.value), param.tolist()


@pytest.mark.ranks(3)
def test_a_state_that_a_server_can_not_read_changes_nothing_there(world):
    for text, values in of_workers(world.run(cannot_be_loaded, knobs=servers(1))):
        assert "AsyncOptimizer.load_state_dict: server 0 (rank 2 of the job, on " in text
        assert "LookupError: no such thing on a server" in text
        assert values == [1, 1]


@in_a_job
def different_workers(what):
    model = torch.nn.Linear(2, 2 + (what == "shape" and hvd.rank()))
    kind = torch.optim.Adam if what == "kind" and hvd.rank() else torch.optim.SGD
    staleness = 2 + hvd.rank() if what == "staleness" else 2
    with pytest.raises(HorovodInternalError) as caught:
        hvd.AsyncOptimizer(
            kind(model.parameters(), lr=0.1), model.named_parameters(), max_staleness=staleness
        )
    return str(caught.value)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("shape", "worker 1 passes weight (0, 'torch.float32', [3, 2]), worker 0 passes weight"),
        ("kind", "worker 1 passes optimizer Adam, worker 0 passes optimizer SGD"),
        ("staleness", "worker 1 passes max_staleness 3, worker 0 passes max_staleness 2"),
    ],
)
def test_workers_that_differ_learn_how(world, what, text):
    for found in of_workers(world.run(different_workers, what, knobs=servers(1))):
        assert text in found


@in_a_job
def bad_use():
    model = torch.nn.Linear(2, 2)

    def sgd(**options):
        return torch.optim.SGD(model.parameters(), lr=0.1, **options)

    def refused(text, make):
        with pytest.raises(ValueError, match=text):
            make()

    good = hvd.AsyncOptimizer(sgd(), max_staleness=1)
    refused("already distributed or asynchronous", lambda: hvd.AsyncOptimizer(good))
    refused("already distributed", lambda: hvd.DistributedOptimizer(good))
    distributed = hvd.DistributedOptimizer(sgd())
    refused("already distributed or asynchronous", lambda: hvd.AsyncOptimizer(distributed))
    refused("LBFGS", lambda: hvd.AsyncOptimizer(torch.optim.LBFGS(model.parameters())))
    refused("got int", lambda: hvd.AsyncOptimizer(3))
    for number in (-1, 1.5, True):
        refused("max_staleness=", lambda n=number: hvd.AsyncOptimizer(sgd(), max_staleness=n))
    refused("servers=2, but the job has 1", lambda: hvd.AsyncOptimizer(sgd(), servers=2))
    refused("sync_replicas=3, but the job", lambda: hvd.AsyncOptimizer(sgd(), sync_replicas=3))
    refused(
        "leave out max_staleness",
        lambda: hvd.AsyncOptimizer(sgd(), max_staleness=2, sync_replicas=1),
    )
    refused("partitioner=5, expected", lambda: hvd.AsyncOptimizer(sgd(), partitioner=5))
    refused("a closure can't be used", lambda: good.step(lambda: 0))
    refused("parameters can't be added", lambda: good.add_param_group({"params": []}))
    model(torch.ones(1, 2)).sum().backward()
    good.step()  # it still works


@pytest.mark.ranks(3)
def test_bad_use_is_a_clear_error(world):
    world.run(bad_use, knobs=servers(1))


@in_a_job
def one_is_late(options):
    said = threading.Event()
    texts = []

    class Handler(logging.Handler):
        def emit(self, record):
            # (On a slow machine the server may take long for its first answers, too.)
            if "which waits for" in record.getMessage():
                texts.append(record.getMessage())
                said.set()

    handler = Handler()
    logging.getLogger("hvdlite").addHandler(handler)
    try:
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.AsyncOptimizer(torch.optim.SGD([param], lr=1.0), **options)
        param.grad = torch.ones(2)
        if hvd.rank() == 0:
            # The other worker goes on when this one has said for whom it waits.
            waits = threading.Thread(target=lambda: [optimizer.step() for _ in range(4)])
            waits.start()
            assert said.wait(50)
        hvd.barrier()
        if hvd.rank() == 0:
            waits.join()
        else:
            for _ in range(4):
                optimizer.step()
    finally:
        logging.getLogger("hvdlite").removeHandler(handler)
    return texts


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("options", "what", "rule"),
    [
        ({"max_staleness": 1}, "step 0", "(max_staleness=1)"),
        ({"sync_replicas": 2}, "gradients of step 0", "(sync_replicas=2: each step needs"),
    ],
)
def test_a_worker_that_waits_for_long_says_for_whom(world, options, what, rule):
    knobs = {**servers(1), "HVDLITE_STALL_CHECK_TIME_SECONDS": "5"}
    texts, others, _ = world.run(one_is_late, options, knobs=knobs)
    assert others == []
    assert len(texts) == 1
    assert "worker 0 (on " in texts[0]
    assert f"which waits for their {what} from: worker 1 (on " in texts[0]
    assert rule in texts[0]


@in_a_job
def begins_again():
    hvd.shutdown()
    with pytest.raises(LaunchError, match="this process has left a job with servers"):
        hvd.init()
    return "refused"


@pytest.mark.ranks(2)
def test_a_job_whose_servers_have_ended_can_not_begin_again(world):
    assert world.run(begins_again, knobs=servers(1)) == ["refused", "served"]
