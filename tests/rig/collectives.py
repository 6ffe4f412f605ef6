"""Run by every rank on the rig: the collectives against the oracles, over real links."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.world import world
from tests.core.oracles import DTYPES, case_of, ops_of

# Empty; tiny, which travels with its posting; one message; several segments.
SIZES = (0, 1, 5, 1021, 70_001)
LARGE = 1_500_007


def check(actual, expected, what):
    assert torch.equal(actual, expected), f"rank {hvd.rank()}: {what}: {actual} != {expected}"


def check_allreduce(dtype, op, count):
    name = f"{op}.{dtype}.{count}"
    given, expected = case_of(dtype, op, hvd.rank(), hvd.size(), count)
    check(hvd.allreduce(given, op=getattr(hvd, op), name=name), expected, name)


def main():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for count in SIZES:
                check_allreduce(dtype, op, count)
    for dtype in ("float32", "bfloat16", "int64"):
        check_allreduce(dtype, "Sum", LARGE)
    for count in (*SIZES, LARGE):
        rows = [
            torch.arange(count + member, dtype=torch.int32) * size + member
            for member in range(size)
        ]
        check(hvd.allgather(rows[rank]), torch.cat(rows), f"allgather of {count}")
        for root in range(size):
            expected = torch.arange(count) * size + root
            check(hvd.broadcast(expected - root + rank, root), expected, f"broadcast from {root}")
    # Opposite orders, with large and small ones between each other.
    names = list(range(40))
    counts = [LARGE if i % 13 == 0 else i for i in names]
    handles = {
        i: hvd.allreduce_async(torch.full((counts[i],), float(rank)), op=hvd.Sum, name=f"{i}")
        for i in (names if rank % 2 else reversed(names))
    }
    for i in names:
        expected = torch.full((counts[i],), size * (size - 1) / 2)
        check(hvd.synchronize(handles[i]), expected, f"opposite orders, {i}")
    hvd.barrier()
    with pytest.raises(hvd.HorovodInternalError, match="make the shape the same") as failure:
        hvd.allreduce(torch.ones(3 if rank == size - 1 else 4), name="mismatch")
    texts = hvd.allgather_object(str(failure.value))
    assert len(set(texts)) == 1, texts
    # The first rank of each host has spoken with the others over the network.
    if hvd.local_rank() == 0:
        assert world.current().team.engine.counters()["data_bytes"] > 0
    print(f"collectives agree: {rank} of {size}, {hvd.local_rank()} of {hvd.local_size()}")


if __name__ == "__main__":
    main()
