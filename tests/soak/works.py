"""What a rank of a soak's job does in a round: each work compares its results with an oracle.

All ranks get the same `chance`, and so draw the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

import hvdlite as hvd
from tests.core.oracles import DTYPES, case_of, ops_of

COUNTS = (0, 1, 5, 33, 257, 1021, 4099, 70_001, 300_007)

Draw = random.Random


class WrongResult(AssertionError):
    """A result that is not the oracle's."""


def same(found: object, wanted: object, what: str) -> None:
    equal = torch.equal if isinstance(found, torch.Tensor) else lambda a, b: a == b
    if not equal(found, wanted):  # type: ignore[arg-type]
        raise WrongResult(f"WRONG RESULT on rank {hvd.rank()}: {what}: {found} != {wanted}")


def _place(on: hvd.ProcessSet) -> tuple[int, int, list[int]]:
    """This member's number in the set, the set's size, and its ranks."""
    rank, size, ranks = on.rank(), on.size(), on.ranks
    assert rank is not None
    assert size is not None
    assert ranks is not None
    return rank, size, list(ranks)


def _allreduces(chance: Draw, on: hvd.ProcessSet, name: str) -> None:
    """Several at once, in another order on each rank."""
    rank, size, _ = _place(on)
    pending = []
    cases = [
        (dtype, chance.choice(ops_of(dtype)), chance.choice(COUNTS))
        for dtype in chance.choices(DTYPES, k=chance.randrange(1, 8))
    ]
    own = list(enumerate(cases))
    random.Random(f"{name} {rank}").shuffle(own)
    for number, (dtype, op, count) in own:
        given, wanted = case_of(dtype, op, rank, size, count)
        what = f"{name} {number} {dtype} {op} {count}"
        handle = hvd.allreduce_async(given, op=getattr(hvd, op), name=what, process_set=on)
        pending.append((handle, wanted, what))
    for handle, wanted, what in pending:
        same(hvd.synchronize(handle), wanted, what)


def _moves(chance: Draw, on: hvd.ProcessSet, name: str) -> None:
    """allgather, broadcast, alltoall and reducescatter."""
    rank, size, ranks = _place(on)
    count = chance.choice(COUNTS)
    rows = [torch.arange(count + member) * size + member for member in range(size)]
    gathered = hvd.allgather(rows[rank], name=f"{name} gather", process_set=on)
    same(gathered, torch.cat(rows), f"{name}: allgather of {count}")
    root = chance.randrange(size)
    sent = hvd.broadcast(
        rows[root] if rank == root else torch.zeros_like(rows[root]),
        ranks[root],
        name=f"{name} cast",
        process_set=on,
    )
    same(sent, rows[root], f"{name}: broadcast of {count} from {root}")
    # To member m go m + 1 rows, which tell who sends them to whom.
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    given = torch.cat([torch.full((to + 1,), float(rank * size + to)) for to in range(size)])
    wanted = torch.cat([torch.full((rank + 1,), float(by * size + rank)) for by in range(size)])
    got, counts = hvd.alltoall(given, splits, name=f"{name} all", process_set=on)
    same(got, wanted, f"{name}: alltoall")
    same(counts.tolist(), [rank + 1] * size, f"{name}: splits of alltoall")
    given, wanted = case_of("float32", "Sum", rank, size, size * (1 + count % 1000))
    mine = hvd.reducescatter(given, op=hvd.Sum, name=f"{name} scatter", process_set=on)
    same(mine, wanted.chunk(size)[rank], f"{name}: reducescatter")


def collectives(chance: Draw, name: str) -> None:
    _allreduces(chance, hvd.global_process_set, name)
    _moves(chance, hvd.global_process_set, name)


def process_sets(chance: Draw, name: str) -> None:
    """Makes some, uses them, and removes them again."""
    ranks = list(range(hvd.size()))
    drawn = {
        tuple(sorted(chance.sample(ranks, chance.randrange(1, len(ranks) + 1)))) for _ in "123"
    }
    sets = [hvd.add_process_set(list(each)) for each in sorted(drawn - {tuple(ranks)})]
    for number, each in enumerate(sets):
        seed = chance.random()
        if each.included():
            _allreduces(Draw(seed), each, f"{name} set {number}")
            _moves(Draw(seed), each, f"{name} set {number}")
    hvd.barrier()
    for each in sets:
        same(hvd.remove_process_set(each), True, f"{name}: remove_process_set")


def optimizer(
    chance: Draw, name: str, spoil: Callable[[torch.nn.Module], None] | None = None
) -> None:
    """SGD on whole numbers, which every step holds exactly, beside the closed form. Sharded or not,
    with shared parameters or not; but with each rank's own, and two steps or more, if the model is
    spoilt before the last step."""
    rank, size = hvd.rank(), hvd.size()
    shapes = [(chance.choice((1, 3, 17, 130)), chance.choice((1, 5, 64))) for _ in range(4)]
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(s).double()) for s in shapes)
    if chance.random() < 0.4 and spoil is None:
        hvd.share_parameters(model)
    shard: bool | str = chance.choice((False, False, True, "host"))
    shard = shard if spoil is None else False
    passes = chance.choice((1, 1, 2))
    made = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=chance.choice((0.0, 0.5))),
        model.named_parameters(),
        op=hvd.Sum,
        shard=shard,
        backward_passes_per_step=passes,
        free_gradients=chance.random() < 0.3,
    )
    momentum, velocity, steps = made.param_groups[0]["momentum"], 0.0, chance.randrange(2, 6)
    inputs = [torch.arange(float(p.numel())).double().reshape(p.shape) * size for p in model]
    wanted = torch.tensor(0.0).double()
    for step in range(steps):
        if spoil is not None and step == steps - 1:
            spoil(model)
        for _ in range(passes):
            sum(((x + rank) * p).sum() for x, p in zip(inputs, model, strict=True)).backward()
        made.step()
        made.zero_grad()
        velocity = velocity * momentum + passes
        wanted = wanted - 0.5 * velocity
    for number, (x, param) in enumerate(zip(inputs, model, strict=True)):
        total = x * size + size * (size - 1) // 2
        what = f"{name}: parameter {number} after {steps} steps, shard={shard}"
        same(param.detach(), total * wanted, what)


def _own_steps(optimizer: torch.optim.Optimizer, own: torch.nn.Parameter, steps: int) -> None:
    for _ in range(steps):
        own.grad = -torch.ones_like(own)
        optimizer.step()


def asynchronous(chance: Draw, name: str) -> None:
    """Parameters that servers hold, or that the workers of each host share. Each worker counts its
    steps in a parameter of its own: none is lost."""
    params = [torch.nn.Parameter(torch.zeros(2, 5 + worker)) for worker in range(hvd.size())]
    made = hvd.AsyncOptimizer(
        torch.optim.SGD(params, lr=1.0), max_staleness=chance.choice((None, 1, 4))
    )
    steps = chance.randrange(1, 8)
    _own_steps(made, params[hvd.rank()], steps)
    made.synchronize()
    hvd.barrier()
    made.pull()
    for worker, param in enumerate(params):
        wanted = torch.full_like(param, float(steps))
        same(param.detach(), wanted, f"{name}: the steps of worker {worker}")
    hvd.barrier()


def objects(chance: Draw, name: str) -> None:
    texts = [f"{name} {rank} " * chance.randrange(1, 2000) for rank in range(hvd.size())]
    same(hvd.allgather_object(texts[hvd.rank()]), texts, f"{name}: allgather_object")
    root = chance.randrange(hvd.size())
    sent = hvd.broadcast_object(texts[root] if hvd.rank() == root else None, root)
    same(sent, texts[root], f"{name}: broadcast_object")


# All ranks take part in each operation of these.
PLAIN = (collectives, objects)
WORKS = (*PLAIN, process_sets, optimizer)
