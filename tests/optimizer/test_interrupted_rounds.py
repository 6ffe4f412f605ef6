"""A signal's handler raises at any line of a step, on one rank, and the program goes on.

The wide tests take every 7th line, each another seventh. HVDLITE_TEST_STRIDE=1 has them take all.
"""

import contextlib
import gc
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.errors import DifferenceError as Differs

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

ONE_BY_ONE = {"HVDLITE_BUCKET_BYTES": "0", "HVDLITE_FIRST_BUCKET_BYTES": "0"}
FILES = (
    *("reducer", "round", "together", "gradients", "sparse_gradients", "backward_pass"),
    *("gradient_optimizer", "bucket", "backward_order", "consistency", "position_exchange"),
    *("positions", "start_values", "host_sum", "host_gather", "weights", "weight_codes"),
)
assert set(FILES) <= {path.stem for path in Path(hvd.__file__).parent.rglob("*.py")}
STRIDE = int(os.environ.get("HVDLITE_TEST_STRIDE", "7"))
STEPS = 4
ROWS = 3
# What the errors on all ranks say. The last: rank 0 was interrupted before it had given a weight.
PARTED = (
    "the ranks are reducing gradients of different backward passes: ",
    "backward() has raised an exception on some ranks when gradients were being reduced",
    "no weight on rank 0",
)


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
        for slot in reducer.gradients.slots
        if reducer.round is not None and slot.bucket is not None and slot.bucket.runs
        if slot.param.grad is slot.view
    ]


class Training:
    """Each step takes the mean of 2 on rank 0 and 4 on rank 1 from each parameter.

    kind: "dense"; "by step", where it is `step` that reduces the gradients; "rows" has a table with
    sparse gradients besides, "rows as dense" in a bucket; with "weights" both ranks give one;
    in "start" the ranks have different values in something that never changes.
    """

    def __init__(self, kind):
        self.dense = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        self.table = [nn.Parameter(torch.zeros(ROWS, 2))] if "rows" in kind else []
        self.by_step = kind == "by step"
        self.weight = 2.0 if "weights" in kind else None
        start = float(hvd.rank()) if kind == "start" else 0.0
        frozen = nn.Parameter(torch.full((1,), start), requires_grad=False)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([*self.parameters(), frozen], lr=1.0),
            sparse_as_dense="as dense" in kind,
        )

    def parameters(self):
        return [*self.dense, *self.table]

    def backward(self):
        if self.weight is not None:
            self.optimizer.set_weight(self.weight)
        weight = 2.0 + 2.0 * hvd.rank()
        loss = sum(param.sum() * weight for param in self.dense)
        for table in self.table:
            rows = nn.functional.embedding(torch.arange(ROWS), table, sparse=True)
            loss = loss + rows.sum() * weight
        with self.optimizer.no_sync() if self.by_step else contextlib.nullcontext():
            loss.backward()

    def steps_done(self):
        return self.optimizer._hvdlite_reducer.position.phase // 2

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
        except hvd.HorovodInternalError:
            raise
        except RuntimeError:
            # Those of the interrupted one are reduced.
            if training.steps_done() == steps_done:
                optimizer.step()
        else:
            optimizer.step()
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
        except KeyboardInterrupt as error:
            sys.settrace(None)
            context = error.__context__
            # (What differs at the start may be no more than a warning.)
            if isinstance(context, hvd.HorovodInternalError) and type(context) is not Differs:
                raise context  # noqa: B904
            assert not in_flight_and_visible(training.optimizer), interrupt.where
            go_on(training, how, done)
        finally:
            sys.settrace(None)
        # A step that was interrupted and made again is one, also if it counts as two.
        made = training.steps_done() - done
        step += made if how == "backward" else min(made, 1)


def at_every_line(how, at, kind, first, stride):
    """The outcome of an interruption at each line, on this rank."""
    hvd.init()
    warnings.simplefilter("always")
    outcomes = {}
    training = failure = None
    # An interruption inside a finalizer would be ignored: these run afterwards.
    gc.disable()
    for line in range(first, 100_000, stride):
        if training is not None and (failure is not None or at == 0):
            # Else those that are left would make the next ones longer by some lines each.
            training.optimizer._hvdlite_reducer.detach()
            training = None
        training = training or Training(kind)
        for param in training.parameters():
            param.data.zero_()
        interrupt = Interrupt(line)
        failure = None
        with warnings.catch_warnings(record=True) as told:
            try:
                train(training, how, at, interrupt)
            except hvd.HorovodInternalError as error:
                failure = str(error)
        outcomes[line] = interrupt.where, failure, training.values(), len(told)
        if hvd.allgather_object(interrupt.where)[0] is None:
            gc.enable()
            warnings.simplefilter("error")
            return outcomes
    raise AssertionError("it came to no end")


def check(results, how, kind, strict):
    ours, theirs = results
    assert ours.keys() == theirs.keys()
    expected = "the ranks start from different values" if strict else None
    for line, (where, failure, values, told) in ours.items():
        _, other_failure, others, _ = theirs[line]
        assert failure == other_failure, (line, where)
        if failure is not None:
            known = any(each in failure for each in (*PARTED, expected) if each)
            assert known, (line, where, failure)
            assert "on rank 0" in failure or strict
            continue
        assert values == others, (line, where)
        # Of the interrupted step what had come of rank 0's gradients; of the others all. A backward
        # without zero_grad() adds to what had come, and after the step to the reduced gradient.
        more = {"step": (0.0, 1.0), "zero_grad": (0.0,), "backward": (0.0, 1.0, -1.0, -1.5)}[how]
        allowed = {-3.0 * STEPS + each for each in more}
        assert {value for param in values for value in param} <= allowed, (line, where, values)
        # Once more where the interruption came just behind the warning.
        assert told in ((1, 2) if kind == "start" else (0,)), (line, where, told)
    assert any(
        expected in (each or "") if expected else each is None for _, each, *_ in ours.values()
    )


HOW = ["step", "zero_grad", "backward"]
KINDS = ["dense", "by step", "rows", "rows as dense"]
STRICT = {"HVDLITE_STRICT": "1"}


def interrupt_lines(world, how, at, kind, first, stride, more=None):
    knobs = {**ONE_BY_ONE, **(more or {})}
    results = world.run(at_every_line, how, at, kind, first, stride, knobs=knobs, limit_s=300)
    print(
        len(results[0]),
        "interruptions,",
        sum(o[1] is not None for o in results[0].values()),
        "errors",
    )
    check(results, how, kind, strict=bool(more))


@pytest.mark.parametrize(("how", "at", "kind"), [("step", 2, "dense"), ("zero_grad", 0, "rows")])
def test_after_an_interruption_all_ranks_go_on_or_all_get_an_error(world, how, at, kind):
    interrupt_lines(world, how, at, kind, 3, 11)


@pytest.mark.parametrize(
    ("how", "at", "kind"),
    [
        ("step", 2, "weights"),
        pytest.param("step", 0, "weights and rows", marks=pytest.mark.wide),
        pytest.param("zero_grad", 2, "weights and rows", marks=pytest.mark.wide),
    ],
)
def test_after_an_interruption_no_gradient_is_multiplied_or_divided_twice(world, how, at, kind):
    interrupt_lines(world, how, at, kind, 3, 11)


@pytest.mark.wide
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_may_come_at_any_line(world, how, at, kind):
    first = (HOW.index(how) + 3 * KINDS.index(kind) + at) % STRIDE
    interrupt_lines(world, how, at, kind, first, STRIDE)


@pytest.mark.wide
@pytest.mark.parametrize("more", [{}, STRICT], ids=["warned", "strict"])
@pytest.mark.parametrize("how", HOW)
def test_ranks_that_start_differently_are_told_so_also_after_an_interruption(world, how, more):
    interrupt_lines(world, how, 0, "start", HOW.index(how) % STRIDE, STRIDE, more)
