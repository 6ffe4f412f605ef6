"""With HVDLITE_DETERMINISTIC=virtual:V a training has the same bits on every number of ranks that
divides V: those of the tree over V micro-batches, whichever ranks compute them."""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.gradient_optimizer import GradientOptimizer
from tests.core import sum_tree

V = 4
KNOBS = {"HVDLITE_DETERMINISTIC": f"virtual:{V}", "HVDLITE_BUCKET_BYTES": "600"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Words(nn.Module):
    """An embedding, a convolution of strided weights, a parameter that only some micro-batches
    reach, one that none does, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 12)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(5, 3)
        self.sometimes = nn.Parameter(torch.randn(7))
        self.never = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, batch, reaches):
        image = self.words(batch).view(-1, 3, 4, 4)
        out = self.last(torch.relu(self.conv(image)).mean((2, 3))) * self.frozen
        loss = out.float().square().mean()
        return loss + self.sometimes.float().cos().sum() * batch[0, 0] if reaches else loss


def started(dtype):
    torch.manual_seed(7)
    return Words().to(dtype)


def batch_of(virtual_rank, step):
    generator = torch.Generator().manual_seed(1000 * step + virtual_rank)
    return torch.randint(11, (2, 4), generator=generator), (virtual_rank + step) % 3 == 0


def backwards(model, step, scaled):
    for virtual_rank in hvd.virtual_ranks():
        scaled(model(*batch_of(virtual_rank, step))).backward()


def oracle(model, step, scaled, op):
    """What `backwards` leaves in `.grad`: the sum over all micro-batches, along the tree."""
    params = [param for param in model.parameters() if param.requires_grad]
    losses = [scaled(model(*batch_of(virtual_rank, step))) for virtual_rank in range(V)]
    by_batch = [torch.autograd.grad(loss, params, allow_unused=True) for loss in losses]
    for param, grads in zip(params, zip(*by_batch, strict=True), strict=True):
        if any(grad is not None for grad in grads):
            filled = [torch.zeros_like(param) if grad is None else grad for grad in grads]
            param.grad = sum_tree.reduced(filled, op)


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-3),
}


def train(model, optimizer, compute):
    """Some steps, of which some clip, or fill `.grad` with zeros; and the parameters."""
    is_scaled = model.never.dtype is torch.float32
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=is_scaled)
    for step in range(5):
        compute(model, step, scaler.scale)
        skips = contextlib.nullcontext()
        if step == 2:
            scaler.unscale_(optimizer)
            if isinstance(optimizer, GradientOptimizer):
                optimizer.synchronize()
                skips = optimizer.skip_synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with skips:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert model.never.grad is None
    return [param.detach().clone() for param in model.parameters()]


def trains_as_the_oracle(**arguments):
    hvd.init()
    wrong = []
    for dtype, name in itertools.product(DTYPES, OPTIMIZERS):
        op = "Average" if name == "Adam" else "Sum"
        of_oracle = started(dtype)
        plain = OPTIMIZERS[name](of_oracle.parameters())
        right = train(of_oracle, plain, functools.partial(oracle, op=op))
        model = started(dtype)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[name](model.parameters()), op=getattr(hvd, op), **arguments
        )
        got = train(model, optimizer, backwards)
        if torch.equal(got[0], started(dtype).words.weight):
            wrong.append(f"{dtype} {name}: nothing is trained")
        if not all(map(torch.equal, got, right)):
            wrong.append(f"{dtype} {name}")
    return wrong


def draw(virtual_rank, size, dtype):
    """Sums of these depend on their order. Some micro-batches have none of it."""
    return None if virtual_rank in LACKS[size] else sum_tree.draw(virtual_rank, size, dtype)


# By the size of a parameter, the micro-batches that do not reach it.
LACKS = {70: (2, 3), 4000: (), 333: (2,), 1: (0, 1, 3)}
SIZES = tuple(LACKS)


def gradients_of_a_step(dtype, op, shown=None):
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=op)
    results = []
    for _ in range(2):  # the buckets may be others in the second one
        for virtual_rank in hvd.virtual_ranks():
            given = [draw(virtual_rank, size, dtype) for size in SIZES]
            terms = zip(params, given, strict=True)
            sum((param * grad).sum() for param, grad in terms if grad is not None).backward()
            if shown is not None:
                shown.append([param.grad is None for param in params])
        results.append([param.grad.clone() for param in params])
        optimizer.step()
        optimizer.zero_grad()
    return results


def expected(dtype, op, size):
    """Along the tree; and one after the other, as autograd accumulates."""
    given = [draw(virtual_rank, size, dtype) for virtual_rank in range(V)]
    given = [torch.zeros(size, dtype=dtype) if grad is None else grad for grad in given]
    folded = functools.reduce(torch.add, given)
    return sum_tree.reduced(given, op), folded / V if op == "Average" else folded


def adds_along_the_tree():
    hvd.init()
    wrong = []
    for dtype, op in itertools.product(DTYPES, ("Average", "Sum")):
        shown = []
        for grads in gradients_of_a_step(dtype, getattr(hvd, op), shown):
            for size, grad in zip(SIZES, grads, strict=True):
                right, fold = expected(dtype, op, size)
                if not sum_tree.same_bits(grad, right):
                    wrong.append(f"{dtype} {op} {size}")
                if size == 4000 and sum_tree.same_bits(right, fold):
                    wrong.append(f"{dtype} {op}: the fold has the bits of the tree")
        each = hvd.virtual_micro_batches()
        if any(all(step) is not (index % each < each - 1) for index, step in enumerate(shown)):
            wrong.append(f"{dtype} {op}: .grad between micro-batches")
    return wrong


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.hosts("1,1", "2,2", "1,2,1")
@pytest.mark.wide_in(1, 4, "2,2", "1,2,1")
@pytest.mark.above_mpi
def test_a_gradient_has_the_bits_of_the_tree_over_all_micro_batches(world):
    assert world.run(adds_along_the_tree, knobs=KNOBS) == [[]] * world.size


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.hosts("1,1", "2,2", "1,2,1")
@pytest.mark.wide_in(4, "2,2", "1,2,1")
@pytest.mark.above_mpi
def test_a_training_has_the_same_bits_on_every_number_of_ranks(world):
    assert world.run(trains_as_the_oracle, knobs=KNOBS) == [[]] * world.size
