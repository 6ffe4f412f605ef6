"""CUDA for queues: streams, events, pinned memory, NCCL. Their only file that needs a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.gpu.devices import Mark, Track

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hvdlite.gpu.backend import Backend


# What is done after so many looks is not worth sleeping for: some 50 µs.
LOOKS_BEFORE_SLEEPING = 40


def _event_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: who waits for it sleeps, and does not spin.
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class CudaTrack:
    """A stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def mark(self) -> Mark:
        return _event_of(self._stream)


class CudaDevices:
    """The CUDA devices of this process. See `hvdlite.gpu.devices` for what each method does."""

    def enter(self, device: torch.device) -> None:
        # A new thread's current device is 0; every rank would start CUDA there.
        torch.cuda.set_device(device)

    def ready(self, tensor: torch.Tensor) -> Mark:
        return _event_of(torch.cuda.current_stream(tensor.device))

    def hand_over(self, done: Any, tensor: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(done)
        # A tensor that the queue has made belongs to the queue's stream.
        tensor.record_stream(stream)

    def stream(self, device: torch.device) -> int:
        return torch._C._cuda_getCurrentRawStream(device.index)

    def wait_for_stream(self, device: torch.device, stream: int) -> None:
        other = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(device).wait_stream(other)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    averages = True

    def track(self, device: torch.device) -> Track:
        return CudaTrack(device)

    def wait(self, mark: Any) -> None:
        for _ in range(LOOKS_BEFORE_SLEEPING):
            if mark.query():
                return
        mark.synchronize()

    def copy(self, to: torch.Tensor, values: torch.Tensor) -> None:
        to.copy_(values, non_blocking=True)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def identity(self, device: torch.device) -> str:
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))

    def problem(self) -> str:
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            return ""
        return f"torch {torch.__version__} has no NCCL"

    def may_be_shared(self) -> bool:
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" or self.problem():
            return False
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return version >= (2, 30)  # older ones don't know the variable

    def group(self, store: Store, rank: int, size: int, device: torch.device) -> Backend:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        group: Any = ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())
        return group  # type: ignore[no-any-return]
