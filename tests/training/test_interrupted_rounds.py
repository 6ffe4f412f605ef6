"""A signal's handler raises at any line of a step, on one rank, and the program goes on."""

import gc
import os
import sys

import pytest
import torch
from torch import nn

import hvdlite as hvd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

ONE_BY_ONE = {"HVDLITE_BUCKET_BYTES": "0", "HVDLITE_FIRST_BUCKET_BYTES": "0"}
FILES = (
    *("reducer", "rounds", "arena", "gradients", "arrivals", "sparse_gradients", "backwards"),
    *("host_sum", "positions", "position_exchange", "optimizer"),
)
STEPS = 4
ROWS = 3


class Interrupt:
    """While it is armed, raises KeyboardInterrupt at the n-th line of the reducer's files."""

    def __init__(self, line):
        self.left = line
        self.where = None

    def arm(self):
        sys.settrace(self.trace)

    def trace(self, frame, event, argument):
        path = frame.f_code.co_filename
        name = os.path.basename(path).removesuffix(".py")
        return self.trace_lines if name in FILES and "/hvdlite/" in path else None

    def trace_lines(self, frame, event, argument):
        if event == "line" and self.where is None:
            self.left -= 1
            if self.left < 0:
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace_lines


def in_flight_and_visible(optimizer):
    """The gradients that the next backward would add to while they are being reduced."""
    reducer = optimizer._hvdlite_reducer
    return [
        slot.name
        for slot in reducer._gradients.slots
        if reducer._open and slot.bucket is not None and slot.bucket.runs
        if slot.param.grad is slot.view
    ]


class Training:
    """Each step takes the mean of 2 on rank 0 and 4 on rank 1 from each parameter."""

    def __init__(self, sparse):
        self.dense = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        self.table = [nn.Parameter(torch.zeros(ROWS, 2))] if sparse else []
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters(), lr=1.0))

    def parameters(self):
        return [*self.dense, *self.table]

    def backward(self):
        weight = 2.0 + 2.0 * hvd.rank()
        loss = sum(param.sum() * weight for param in self.dense)
        for table in self.table:
            rows = nn.functional.embedding(torch.arange(ROWS), table, sparse=True)
            loss = loss + rows.sum() * weight
        loss.backward()

    def steps_done(self):
        return self.optimizer._hvdlite_reducer._position.phase // 2

    def values(self):
        return [param.detach().flatten().tolist() for param in self.parameters()]


def go_on(training, how, steps_done):
    """As a user might."""
    optimizer = training.optimizer
    if how == "step":
        if training.steps_done() == steps_done:
            optimizer.step()
    elif how == "backward":
        try:
            training.backward()
            optimizer.step()
        except hvd.HorovodInternalError:
            raise
        except RuntimeError:
            # It raised before, or its gradients are reduced already.
            optimizer.synchronize()
    optimizer.zero_grad()


def train(training, how, at, interrupt):
    """Trains for some steps; on rank 0 the interruption is in step `at`."""
    step = 0
    while step < STEPS:
        done = training.steps_done()
        if hvd.rank() == 0 and step == at:
            interrupt.arm()
        try:
            training.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        except KeyboardInterrupt:
            sys.settrace(None)
            assert not in_flight_and_visible(training.optimizer), interrupt.where
            go_on(training, how, done)
        finally:
            sys.settrace(None)
        # A step that was interrupted and made again is one, also if it counts as two.
        made = training.steps_done() - done
        step += made if how == "backward" else min(made, 1)


def at_every_line(how, at, sparse, first, stride):
    """What came of an interruption at each line, on this rank."""
    hvd.init()
    outcomes = {}
    training = None
    # An interruption inside a finalizer would be ignored: these run afterwards.
    gc.disable()
    for line in range(first, 100_000, stride):
        if training is None or at == 0:
            training = Training(sparse)
        for param in training.parameters():
            param.data.zero_()
        interrupt = Interrupt(line)
        failure = None
        try:
            train(training, how, at, interrupt)
        except hvd.HorovodInternalError as error:
            failure = str(error)
        outcomes[line] = interrupt.where, failure, training.values()
        if failure is not None:
            training = None
        if hvd.allgather_object(interrupt.where)[0] is None:
            gc.enable()
            return outcomes
    raise AssertionError("it came to no end")


def check(results, how):
    ours, theirs = results
    assert ours.keys() == theirs.keys()
    for line, (where, failure, values) in ours.items():
        _, other_failure, others = theirs[line]
        assert failure == other_failure, (line, where)
        if failure is not None:
            assert "gradients of different backwards" in failure, (line, where)
            assert "on rank 0" in failure
            continue
        assert values == others, (line, where)
        # Of the interrupted step what had come of rank 0's gradients, which a backward without
        # zero_grad() adds to; of the others all.
        more = {"step": 1.0, "zero_grad": 0.0, "backward": -1.0}[how]
        allowed = {-3.0 * STEPS, -3.0 * STEPS + more}
        assert {value for param in values for value in param} <= allowed, (line, where, values)
    assert None in {failure for _, failure, _ in ours.values()}


HOW = ["step", "zero_grad", "backward"]


@pytest.mark.parametrize(("how", "at", "sparse"), [("step", 2, False), ("zero_grad", 0, True)])
def test_after_an_interruption_all_ranks_go_on_or_all_get_an_error(world, how, at, sparse):
    check(world.run(at_every_line, how, at, sparse, 3, 11, knobs=ONE_BY_ONE), how)


@pytest.mark.wide
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("at", "sparse"), [(0, False), (2, False), (0, True), (2, True)])
def test_an_interruption_may_come_at_any_line(world, how, at, sparse):
    check(world.run(at_every_line, how, at, sparse, 0, 1, knobs=ONE_BY_ONE, limit_s=120), how)
