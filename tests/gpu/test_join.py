"""A joined rank launches nothing, so that the GPU tensors of the others go through host memory."""

import pytest
import torch

import hvdlite as hvd
from tests.gpu.stand_in import allreduce, new_queue, request, result_of

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.hosts("1,1", "2,1")]


def run_out_of_data(route):
    """Rank r has r + 1 batches. Twice, with launches in between."""
    queue = new_queue(route)
    rank, size = hvd.rank(), hvd.size()
    problems = []
    for epoch in range(2):
        # In flight while ranks join; no rank waits for it before.
        last = allreduce(queue, f"of all {epoch}", torch.full((3,), float(rank)))
        for batch in range(rank + 1):
            present = range(batch, size)
            transfers = {
                op: allreduce(queue, f"{op} {batch}", torch.full((7,), rank + 2.0), op)
                for op in ("Sum", "Average", "Min", "Product")
            }
            expected = {
                "Sum": sum(member + 2.0 for member in present),
                "Average": sum(member + 2.0 for member in present) / size,
                "Min": batch + 2.0,
                "Product": torch.tensor([member + 2.0 for member in present]).prod().item(),
            }
            for op, transfer in transfers.items():
                if not torch.allclose(result_of(transfer), torch.full((7,), expected[op])):
                    problems.append((epoch, batch, op, transfer.value()))
        if rank == size - 1:
            given = torch.ones(2)
            # All others have joined.
            text = queue.start(request("broadcast", "b", given), given, given.clone()).wait()
            if "has joined" not in (text or ""):
                problems.append(text)
        if hvd.join() != size - 1:
            problems.append("the last one")
        if result_of(last).tolist() != [size * (size - 1) / 2] * 3:
            problems.append(("in flight", last.value()))
        # All are there again.
        if result_of(allreduce(queue, "after", torch.ones(5))).tolist() != [size] * 5:
            problems.append((epoch, "after"))
    assert not problems, problems


@pytest.mark.parametrize("route", ["group", "staged"])
def test_allreduces_of_a_gpu_queue_go_on_while_ranks_have_joined(world, route):
    world.run(run_out_of_data, route)
