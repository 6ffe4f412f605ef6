"""The stand-ins for GPUs and NCCL in tests: tensors in host memory, and Gloo.

A queue of work is here the thread that works, so that each mark is reached when it is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

import hvdlite as hvd
from hvdlite import _core
from hvdlite.gpu.backend import Backend
from hvdlite.gpu.devices import Mark, Track
from hvdlite.gpu.launches import Launch, Launches
from hvdlite.gpu.queue import GpuQueue
from hvdlite.gpu.setup import connect
from hvdlite.gpu.transfer import Transfer
from hvdlite.ops import DTYPES
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet


class OnGpu(torch.Tensor):
    """A tensor in host memory that says of itself that it is on a GPU, as do its results."""

    is_cpu = False
    is_cuda = True
    # Called before each function of torch that gets such a tensor.
    watch: Callable[..., None] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if OnGpu.watch is not None:
            OnGpu.watch(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu)


class Reached:
    """A mark behind work that is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostTrack:
    """A queue of which nothing is ever left."""

    @contextlib.contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        assert mark.query()
        yield

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def mark(self) -> Mark:
        return Reached()


class HostDevices:
    """As if host memory were a GPU of this process's own, with Gloo for its NCCL."""

    def __init__(self, identity: str = "", problem: str = "", shared: bool = False) -> None:
        self._identity = identity or f"process {os.getpid()}"
        self._problem = problem
        self._shared = shared

    def enter(self, device: torch.device) -> None:
        pass

    def ready(self, tensor: torch.Tensor) -> Mark:
        return Reached()

    def hand_over(self, done: Any, tensor: torch.Tensor) -> None:
        assert done.query()

    def stream(self, device: torch.device) -> int:
        return 0

    def wait_for_stream(self, device: torch.device, stream: int) -> None:
        raise AssertionError("there is one queue")

    def keep(self, tensor: torch.Tensor) -> None:
        raise AssertionError("there is one queue")

    capturing = False

    def is_capturing(self) -> bool:
        return self.capturing

    averages = False

    def track(self, device: torch.device) -> Track:
        return HostTrack()

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def copy(self, to: torch.Tensor, values: torch.Tensor) -> None:
        to.copy_(values)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def identity(self, device: torch.device) -> str:
        return self._identity

    def problem(self) -> str:
        return self._problem

    def may_be_shared(self) -> bool:
        return self._shared

    def group(self, store: Store, rank: int, size: int, device: torch.device) -> Backend:
        group: Any = ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
        return group  # type: ignore[no-any-return]


class LateTrack:
    """A queue of copies of which one is done per look at a mark behind it, or all when somebody
    waits for that mark."""

    def __init__(self, devices: LateDevices) -> None:
        self._devices = devices
        self.jobs: list[Callable[[], object]] = []
        self.num_done = 0

    @contextlib.contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        self.jobs.append(mark.synchronize)
        current = self._devices.current
        before, current.track = getattr(current, "track", None), self
        yield
        current.track = before

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def mark(self) -> Mark:
        return Late(self, len(self.jobs))

    def work(self, upto: int) -> None:
        with self._devices.working:
            while self.num_done < upto:
                self.jobs[self.num_done]()
                self.num_done += 1


class Late:
    """A mark that is reached when the copies before it are made."""

    def __init__(self, track: LateTrack, position: int) -> None:
        self._track = track
        self._position = position

    def query(self) -> bool:
        reached = self._track.num_done >= self._position
        self._track.work(min(self._track.num_done + 1, self._position))
        return reached

    def synchronize(self) -> None:
        self._track.work(self._position)


class LateDevices(HostDevices):
    """Devices whose copies are made late. Counts copies and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.working = threading.RLock()
        self.current = threading.local()
        self.own = LateTrack(self)
        self.num_copies = 0
        self.buffer_bytes: list[int] = []

    def ready(self, tensor: torch.Tensor) -> Mark:
        return self.own.mark()

    def hand_over(self, done: Any, tensor: torch.Tensor) -> None:
        done.synchronize()  # who reads host memory does not wait for a queue

    def track(self, device: torch.device) -> Track:
        return LateTrack(self)

    def copy(self, to: torch.Tensor, values: torch.Tensor) -> None:
        self.num_copies += 1
        track = getattr(self.current, "track", None) or self.own
        track.jobs.append(lambda: to.copy_(values))

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.buffer_bytes.append(num_bytes)
        return super().host_buffer(num_bytes).fill_(255)


# By which way a queue's tensors go.
ROUTES: dict[str, Callable[..., Any] | None] = {
    "group": functools.partial(connect, choice="nccl"),
    "auto": functools.partial(connect, choice="auto"),
    "staged": None,
}


def new_queue(route: str = "group", devices: HostDevices | None = None) -> GpuQueue:
    """The queue of a new world, which takes tensors in host memory. Every rank calls it."""
    hvd.shutdown()
    hvd.init()
    return queue_for(hvd.global_process_set, route, devices)


def queue_for(
    process_set: ProcessSet, route: str = "group", devices: HostDevices | None = None
) -> GpuQueue:
    """The same for a process set, which must not have a queue yet. Its members call it."""
    team = process_set.team
    assert team is not None
    assert team.gpu_queue is None
    assert world.is_initialized()
    team.gpu_queue = GpuQueue(team, devices or HostDevices(), ROUTES[route])
    return team.gpu_queue


def request(
    kind: str, name: str, tensor: torch.Tensor, op: str = "Average", **rest: Any
) -> _core.Posting:
    """A named collective of this tensor."""
    numbers = _core.__dict__
    return _core.posting(
        *(numbers[kind.upper()], name, False, DTYPES[tensor.dtype], tensor),
        op=numbers[op.upper()],
        **rest,
    )


def allreduce(
    queue: GpuQueue, name: str, tensor: torch.Tensor, op: str = "Sum", **rest: Any
) -> Transfer:
    """Starts an allreduce in the queue."""
    return queue.start(
        request("allreduce", name, tensor, op, **rest), tensor, torch.empty_like(tensor)
    )


def result_of(transfer: Transfer) -> torch.Tensor:
    """Waits for it; a failure is raised."""
    failure = transfer.wait()
    if failure is not None:
        raise hvd.HorovodInternalError(failure)
    return transfer.value()


def count_launches() -> list[_core.Posting]:
    """A list to which the requests are added that optimizers launch themselves from now on."""
    launched: list[_core.Posting] = []
    real = Launches.start

    def start(
        self: Launches, request: _core.Posting, memory: torch.Tensor, at_once: bool
    ) -> Launch | Transfer:
        if at_once:
            launched.append(request)
        return real(self, request, memory, at_once)

    Launches.start = start  # type: ignore[method-assign]
    return launched


def count_starts(queue: GpuQueue) -> list[_core.Posting]:
    """A list to which the requests are added that the queue gets from now on."""
    starts: list[_core.Posting] = []
    real = queue.start

    def start(request: _core.Posting, *rest: Any, **more: Any) -> Transfer:
        if not request.name.endswith(".communicator"):
            starts.append(request)
        return real(request, *rest, **more)

    vars(queue)["start"] = start
    return starts
