"""What a failed operation of a process group raises."""

from __future__ import annotations

import torch.distributed as dist

from hvdlite.errors import HorovodInternalError


class CollectiveError(dist.DistBackendError, HorovodInternalError):
    """An operation of a process group failed: on every member, with the same text. Both the kind
    that torch's backends raise and the one of Horovod's API; a RuntimeError."""


class OperationTimeoutError(CollectiveError):
    """The other ranks did not call the operation in time."""
