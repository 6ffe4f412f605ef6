"""The backend of a group: a process group of torch, or none if the group has one member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        AllreduceOptions,
        AllToAllOptions,
        BroadcastOptions,
        ReduceScatterOptions,
    )


class Work(Protocol):
    """A collective that torch has started."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Backend(Protocol):
    """The methods used of torch's ProcessGroupNCCL; ProcessGroupGloo has the same ones."""

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions, /) -> Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions, /) -> Work: ...

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, /) -> Work: ...

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        received: list[int],
        sent: list[int],
        options: AllToAllOptions,
        /,
    ) -> Work: ...

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, options: ReduceScatterOptions, /
    ) -> Work: ...


class Done:
    """The work of a group of one."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Alone:
    """The backend of a group of one member: the result is the input. A process on its own needs no
    NCCL and does not start it."""

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions, /) -> Done:
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions, /) -> Done:
        return Done()

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, /) -> Done:
        output.copy_(tensor)
        return Done()

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        received: list[int],
        sent: list[int],
        options: AllToAllOptions,
        /,
    ) -> Done:
        output.copy_(tensor)
        return Done()

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, options: ReduceScatterOptions, /
    ) -> Done:
        output.copy_(tensor)
        return Done()
