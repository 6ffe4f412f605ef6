"""Takes a transfer through host memory: copies it there, posts it to the engine, copies it back.

For ranks that share a GPU, and for operations that NCCL does not have. The host never waits for a
copy: each direction has its own track, and the lane polls the copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hvdlite import _core
from hvdlite.gpu.devices import Devices, Track
from hvdlite.gpu.transfer import Transfer
from hvdlite.result_tensors import gathered_result

if TYPE_CHECKING:
    from hvdlite.world.teams.team import Team


class Staging:
    """One transfer that passes through host memory."""

    def __init__(
        self, team: Team, devices: Devices, outward: Track, inward: Track, transfer: Transfer
    ) -> None:
        """Starts the copy to the host. outward, inward: queues of the tensor's device."""
        tensor = transfer.tensor
        assert tensor is not None
        assert transfer.ready is not None
        self._team = team
        self._inward = inward
        self._transfer = transfer
        self._operation: _core.Operation | None = None
        # The copy back is queued, or it has failed.
        self.finished = False
        self.failure: str | None = None
        self._source = self._output = devices.host_buffer(tensor)
        if _core.KINDS[transfer.request.kind].shares:
            assert transfer.result is not None
            self._output = devices.host_buffer(transfer.result)
        with outward.behind(transfer.ready):
            self._source.copy_(tensor, non_blocking=True)
        outward.keep(tensor)
        self._copied = outward.mark()

    def advance(self) -> bool:
        """Does whatever can be done now; returns whether it did anything.

        Raises:
            RuntimeError: the engine is closed.
        """
        if self._operation is None:
            if not self._copied.query():
                return False
            self._post()
            return True
        if not self._operation.poll():
            return False
        self.failure = self._operation.wait()
        if self.failure is None:
            self._copy_back(self._operation)
        self.finished = True
        return True

    def _post(self) -> None:
        request = self._transfer.request
        staged = request.replace(
            name=f"{request.name} (staged)",
            unnamed=False,
            place=_core.STAGED,
            source=self._source,
            result=None if self._transfer.gathers else self._output,
        )
        self._operation = self._team.post(staged)

    def _copy_back(self, operation: _core.Operation) -> None:
        transfer, output = self._transfer, self._output
        tensor = transfer.tensor
        assert tensor is not None
        assert transfer.ready is not None
        if transfer.gathers:
            transfer.counts = operation.rows()
            output = gathered_result(operation, tensor.dtype)
        with self._inward.behind(transfer.ready):
            if transfer.result is None:
                transfer.result = torch.empty_like(output, device=tensor.device)
            transfer.result.copy_(output, non_blocking=True)
        self._inward.keep(transfer.result)
        transfer.done = self._inward.mark()
