"""What a step sends and holds is what the cost model says, up to 64 simulated hosts."""

from pathlib import Path

import pytest
import torch

from benchmarks import asynchronous_cost as cost
from hvdlite.asynchronous.messages import HEADER_BYTES
from tests.asynchronous.simulation import Job

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "cost.md"
PART_BYTES = 1 << 14
# A page before memory that is shared, and Adam's count of steps.
MORE_BYTES = 4096 + 64


def storages_of(*things):
    """By address the bytes of all tensors that can be reached through attributes and containers."""
    seen, storages = set(), {}
    left = list(things)
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            left += [*thing, *thing.values()]
        elif isinstance(thing, (list, tuple, set)):
            left += thing
        elif type(thing).__module__.startswith(("hvdlite.asynchronous", "torch.optim")):
            left += vars(thing).values()
    return storages


def held_by_server(server):
    return sum(storages_of(server).values())


def held_by_worker(worker):
    """What it maps of a server's memory is the server's."""
    mapped = storages_of([link._memory for link in worker.links])
    held = storages_of(worker, [param.grad for param in worker.params])
    return sum(size for address, size in held.items() if address not in mapped)


@pytest.mark.parametrize(
    ("hosts", "local_size", "servers"),
    [(1, 1, 1), (1, 4, 1), (2, 1, 1), (2, 2, 2), (3, 2, 2), (16, 1, 4), (64, 1, 3)],
)
def test_a_step_sends_and_holds_what_the_model_counts(hosts, local_size, servers, monkeypatch):
    simulated = Job(monkeypatch, hosts, local_size, servers, servers * PART_BYTES)
    model = cost.Job(hosts, local_size, servers, servers * PART_BYTES)
    network = simulated.network
    simulated.step()  # also sends the options, and makes the state
    network.messages.zero_(), network.bytes.zero_()
    simulated.step()
    for host, ranks in enumerate(simulated.hosts):
        far = [rank for rank in range(network.size) if rank not in ranks]
        for rank in ranks:
            if rank in simulated.servers:
                sent_bytes, headers = cost.sent_by_owner(model), model.far_workers
                held_bytes = held_by_server(simulated.servers[rank])
                expected_bytes = cost.owner_bytes(model)
            else:
                sent_bytes, headers = cost.sent_by_worker(model, host), model.far(host)
                held_bytes = held_by_worker(simulated.workers[rank])
                expected_bytes = cost.worker_bytes(model, host)
                count = cost.messages(model, host)
                assert network.messages[rank].sum() == network.messages[:, rank].sum() == count
            for counted in (network.bytes[rank, far], network.bytes[far, rank]):
                assert counted.sum() == sent_bytes + headers * HEADER_BYTES
            assert expected_bytes <= held_bytes <= expected_bytes + MORE_BYTES, (host, rank)
    simulated.close()


def test_the_page_has_the_table():
    assert cost.asynchronous_training() in PAGE.read_text()
