"""Something raises on one rank, in a backward pass or a step, and the program goes on.

The round is given up on all ranks, each with an error, or all make the step, or the next round says
that they have not; parameters are those of before or after a step; nobody waits for ever.
"""

import contextlib
import functools
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.collectives.host_gather import HostGather
from hvdlite.collectives.host_sum import HostSum
from hvdlite.optimizer import together
from hvdlite.optimizer.buckets.backward_order import BackwardOrder
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.gpu_bucket import GpuBucket
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.optimizer.buckets.round_record import RoundRecord
from hvdlite.optimizer.checks.consistency import ConsistencyCheck
from hvdlite.optimizer.checks.start_values import StartValues
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.reducer import Reducer
from hvdlite.optimizer.round import Round
from hvdlite.optimizer.weights import Weights
from tests.gpu.stand_in import new_queue, on_gpu

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

ONE_BY_ONE = {"HVDLITE_BUCKET_BYTES": "0", "HVDLITE_FIRST_BUCKET_BYTES": "0"}
PARAMS = 3
RAISING = 1  # the rank
# What all ranks are told in the next step, if only some have made this one.
PARTED = "the ranks are reducing gradients of different backward passes: "

# Where it raises, by name: in the step of that number, at the n-th call of the method, before or
# after what the method does.
EVERY_STEP = [
    *((Round, "start_complete", n) for n in range(PARAMS)),
    (Round, "start_rest", 0),
    *((Round, "collect", 0), (Round, "_wait", 0), (Reducer, "collect_round", 0)),
    *((Reducer, "_close_round", 0), (Reducer, "_end_backward", 0), (together, "finish_rounds", 0)),
    *((Weights, "divide", 0), (Reducer, "end_step", 0), (Reducer, "next_step", 0)),
    *((Position, "begin_step", 0), (torch.optim.SGD, "step", 0), (torch.optim.SGD, "zero_grad", 0)),
]
ON_HOST = [(Bucket, name, n) for name in ("start", "wait") for n in range(PARAMS)]
ON_GPU = [
    *((GpuBucket, name, n) for name in ("start", "wait") for n in range(PARAMS)),
    *((RoundRecord, name, 0) for name in ("begin", "launch", "end", "_post_end", "wait")),
]
FIRST_STEP = [
    *((ConsistencyCheck, name, 0) for name in ("post", "wait")),
    *((BackwardOrder, name, 0) for name in ("post", "wait", "learn")),
    *((StartValues, "hash", 0), (StartValues, "require_same", 0), (Gradients, "learn_order", 0)),
    *((HostSum, "post", 0), (HostSum, "wait", 0)),
]
NEW_BUCKETS = [
    *((Gradients, "_build", 0), (Gradients, "_prepare", 0), (ConsistencyCheck, "post", 0)),
    *((Bucket, "make_plan", n) for n in range(PARAMS + 1)),
]
ROWS = [(HostGather, name, n) for name in ("post", "wait") for n in range(2)]
POINTS = {
    "on the host": (2, [*EVERY_STEP, *ON_HOST]),
    "on a GPU": (2, [*EVERY_STEP, *ON_GPU]),
    "in the first step": (0, FIRST_STEP),
    "thawed": (2, NEW_BUCKETS),
    "sparse": (2, ROWS),
}


class Interrupted(KeyboardInterrupt):
    pass


@contextlib.contextmanager
def raising_at(owner, name, number, after):
    """Inside, that call raises `Interrupted`, once. Yields a list that is not empty when it has."""
    original, calls, raised = getattr(owner, name), [], []

    @functools.wraps(original)
    def method(*args, **kwargs):
        calls.append(name)
        now = len(calls) == number + 1
        if now and not after:
            raised.append(name)
            raise Interrupted
        result = original(*args, **kwargs)
        if now:
            raised.append(name)
            raise Interrupted
        return result

    setattr(owner, name, method)
    try:
        yield raised
    finally:
        setattr(owner, name, original)


class Training:
    """Each step takes 3·(n+1), the mean of the ranks, from the n-th parameter."""

    def __init__(self, to, sparse):
        self.params = [nn.Parameter(to(torch.zeros(2, 2))) for _ in range(PARAMS)]
        self.sparse = sparse
        self.frozen = nn.Parameter(to(torch.zeros(1)), requires_grad=False)
        sgd = torch.optim.SGD([*self.params, self.frozen], lr=1.0)
        self.optimizer = hvd.DistributedOptimizer(sgd)
        self.steps = 0  # that all ranks have made

    def backward(self):
        weight = 2.0 + 2.0 * hvd.rank()
        loss = 0.0
        for number, param in enumerate(self.params):
            if self.sparse:
                param = nn.functional.embedding(torch.arange(2), param, sparse=True)
            loss = loss + param.sum() * (weight * (number + 1))
        loss.backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def made(self):
        """How many steps these parameters have seen."""
        found = {
            round(value / (-3.0 * (number + 1)), 6)
            for number, param in enumerate(self.params)
            for value in torch.Tensor(param.detach()).flatten().tolist()
        }
        assert len(found) == 1, f"parameters are in between: {found}"
        return found.pop()

    def steps_made(self):
        return self.optimizer._hvdlite_reducer.position.phase // 2

    def go_on(self, how):
        """As a program might that has caught it, and knows whether it has made its step; every
        error says what else to call. Returns the text of the error that the others get in their
        next step, if it comes now."""
        found, refused = [], "zero_grad()"
        if how != "zero_grad" and self.steps_made() == self.steps:
            try:
                if how == "backward":
                    for param in self.params:
                        param.grad = None
                    self.backward()
                self.optimizer.step()
            except hvd.HorovodInternalError as error:
                found += [str(error)] * (PARTED in str(error))
            except RuntimeError as error:
                refused = str(error)
        assert "zero_grad()" in refused
        try:
            self.optimizer.zero_grad()
        except hvd.HorovodInternalError:
            self.optimizer.zero_grad()
        return found


def interrupt(training, which, point, after, how):
    """Interrupts a step. Returns the texts of this rank's errors in it, and in the next one."""
    at, _ = POINTS[which]
    texts, later = [], []
    while training.steps < at:
        training.step()
        training.steps += 1
    training.frozen.requires_grad_(which == "thawed")
    if hvd.rank() == RAISING:
        with raising_at(*point, after) as raised:
            try:
                training.step()
            except Interrupted:
                later = training.go_on(how)
        assert raised, "the point was never reached"
    else:
        try:
            training.step()
        except hvd.HorovodInternalError as error:
            texts.append(str(error))
            training.optimizer.zero_grad()
    training.made()
    return texts, later


def require_the_same(training, texts, later):
    """The next steps are right, after at most one more error, which all ranks get."""
    for _ in range(2 - len(later)):
        try:
            training.step()
        except hvd.HorovodInternalError as error:
            later.append(str(error))
            training.optimizer.zero_grad()
    assert hvd.allgather_object(later) == [later] * hvd.size()
    assert len(later) <= 1
    made = hvd.allgather_object(training.made())
    if len(set(made)) > 1:
        assert texts or later, "the ranks' parameters differ without a word"
    hvd.broadcast_parameters(dict(enumerate(training.params)), root_rank=0)
    before = training.made()
    for _ in range(2):
        training.step()
    assert training.made() == before + 2


def at_all_points(which, how, after):
    hvd.init()
    to = on_gpu if which == "on a GPU" else lambda tensor: tensor
    if which == "on a GPU":
        new_queue("group")
    outcomes = []
    for point in POINTS[which][1]:
        training = Training(to, which == "sparse")
        texts, later = interrupt(training, which, point, after, how)
        require_the_same(training, texts, later)
        assert all("Interrupted on rank 1" in text for text in texts), (point, texts)
        assert all(PARTED in text for text in later), (point, later)
        outcomes.append((point[1], len(texts), len(later)))
        training.optimizer._hvdlite_reducer.detach()
    return outcomes


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("how", ["zero_grad", "step", "backward"])
@pytest.mark.parametrize("which", POINTS)
def test_what_raises_on_one_rank_is_a_step_or_an_error_on_all(world, which, how, after):
    results = world.run(at_all_points, which, how, after, knobs=ONE_BY_ONE, limit_s=100)
    if (which, how) != ("thawed", "backward"):  # there no round has begun, and nothing is lost
        assert any(now or later for _, now, later in results[0])


def interrupted_by_a_signal(folder):
    hvd.init()
    training = Training(lambda tensor: tensor, sparse=False)
    training.step()
    told = folder / "interrupted"
    if hvd.rank() == RAISING:
        reducer = training.optimizer._hvdlite_reducer
        threading.Thread(target=interrupt_the_wait, args=(reducer,), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            training.backward()
        told.touch()
        training.optimizer.zero_grad()
    else:
        while not told.exists():
            time.sleep(0.01)
        training.step()
    with pytest.raises(hvd.HorovodInternalError, match="different backward passes"):
        training.backward()


def interrupt_the_wait(reducer):
    """Ctrl-C, once the main thread has nothing to do but wait for the other rank's gradients."""
    while reducer.round is None or not all(bucket.runs for bucket in reducer.gradients.buckets):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_wait_for_gradients(world, tmp_path):
    world.run(interrupted_by_a_signal, tmp_path)
