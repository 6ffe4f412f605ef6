"""Servers and workers of up to 64 hosts in one process: the code of hvdlite.asynchronous over a
network in memory, which counts."""

import collections
import queue
import threading
from types import SimpleNamespace

import torch

from hvdlite.asynchronous import worker as workers_module
from hvdlite.asynchronous.messages import REQUEST_TAG, Header, Kind
from hvdlite.asynchronous.partitioners import FixedShardsPartitioner
from hvdlite.asynchronous.server import Server
from hvdlite.asynchronous.worker import Worker
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.world.teams.placement import Placement
from hvdlite.world.teams.roles import Everyone, roles_of

LIMIT_S = 30.0


class Network:
    """Messages between ranks. `messages` and `bytes` by sender and receiver."""

    def __init__(self, size):
        self.size = size
        self.messages = torch.zeros((size, size), dtype=torch.int64)
        self.bytes = torch.zeros((size, size), dtype=torch.int64)
        self._arrived = collections.defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def engine(self, rank):
        return SimpleNamespace(
            send=lambda tensor, to, tag: self._send(rank, to, tag, tensor),
            recv=lambda tensor, source, tag, *_: Receive(self.arrived(source, rank, tag), tensor),
            give_up=lambda text: None,
        )

    def arrived(self, source, rank, tag):
        with self._lock:
            return self._arrived[source, rank, tag]

    def _send(self, rank, to, tag, tensor):
        with self._lock:
            self.messages[rank, to] += 1
            self.bytes[rank, to] += tensor.nbytes
        self.arrived(rank, to, tag).put(tensor.clone())
        return SimpleNamespace(wait=lambda: None)


class Receive:
    """The receives of one source and tag are waited for in the order in which they were posted."""

    def __init__(self, arrived, tensor):
        self._arrived, self._tensor = arrived, tensor

    def wait(self):
        self._tensor.copy_(self._arrived.get(timeout=LIMIT_S))


class OneWorld:
    """What a worker asks `hvdlite.world` for; `acting` is the worker that asks."""

    active = None

    def __init__(self, size):
        self._size, self.acting, self._told = size, 0, None

    def rank(self):
        return self.acting

    def size(self):
        return self._size

    def current(self):
        config = SimpleNamespace(stall_check_disable=True)
        hooks = {name: [] for name in ("before_joining", "after_joining")}
        return SimpleNamespace(next_async_optimizer=0, async_workers={}, config=config, **hooks)

    def broadcast_object(self, value, root, name):
        """Worker 0 comes first."""
        if self.acting == root:
            self._told = value
        return self._told


def parameter(shape):
    return torch.nn.Parameter(torch.zeros(shape))


class Job:
    """Workers on each host, which train one parameter with Adam, and servers."""

    def __init__(self, monkeypatch, hosts, local_size, num_servers, parameter_bytes):
        sizes = [local_size + (host >= hosts - num_servers) for host in range(hosts)]
        ranks = iter(range(sum(sizes)))
        self.hosts = tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)
        self.network = Network(sum(sizes))
        placement = Placement(0, self.hosts, tuple(f"host{i}" for i in range(hosts)))
        self.roles = roles_of(placement, num_servers)
        self._placement = placement
        self.world = OneWorld(len(self.roles.workers))
        monkeypatch.setattr(workers_module, "world", self.world)
        monkeypatch.setattr(workers_module, "broadcast_object", self.world.broadcast_object)
        self.servers = {rank: Server(self._everyone(rank)) for rank in self.roles.servers}
        self._threads = [threading.Thread(target=each.run) for each in self.servers.values()]
        for thread in self._threads:
            thread.start()
        shape = (num_servers, parameter_bytes // 4 // num_servers)
        self.optimizers = {
            rank: torch.optim.Adam([parameter(shape)]) for rank in self.roles.workers
        }
        self.workers = {rank: self._worker(rank) for rank in self.roles.workers}

    def _everyone(self, rank):
        team = SimpleNamespace(engine=self.network.engine(rank), rank=rank, close=lambda: None)
        return Everyone(team, self._placement, self.roles)

    def _worker(self, rank):
        self.world.acting = self.roles.workers.index(rank)
        return Worker(
            self._everyone(rank),
            self.optimizers[rank],
            ParameterNames([], list),
            servers=self.roles.servers,
            partitioner=FixedShardsPartitioner(len(self.servers)),
            staleness=None,
            replicas=None,
        )

    def step(self):
        """Each worker makes one, and gets the parameters."""
        for rank, worker in self.workers.items():
            for param in worker.params:
                param.grad = torch.ones_like(param)
            worker.step(self.optimizers[rank])
        for worker in self.workers.values():
            for link in worker.links:
                link.take_reply()

    def close(self):
        for number, rank in enumerate(self.roles.workers):
            for server in self.roles.servers:
                self.network.engine(rank).send(
                    Header(Kind.BYE, number).tensor(), server, REQUEST_TAG
                )
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
