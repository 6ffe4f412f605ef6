"""Starts a collective, wherever its tensors are.

Tensors on a CUDA device go through the team's queue (`hvdlite.gpu`). A tensor on another kind of
device is copied to host memory, reduced or sent from there, and its result is copied back.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.handles import Handle
from hvdlite.gpu import goes_by_gpu, queue_of
from hvdlite.result_tensors import gathered_result
from hvdlite.world.process import gpu_pinning
from hvdlite.world.teams.team import Team


def begin(team: Team, posting: _core.Posting, wake: bool) -> Handle:
    """Starts a collective and returns.

    Args:
        posting: Its source is contiguous and not a negated view. Its result is on the same device
            and may be the source; None if the kind gathers: the result is made when its size is
            known.
        wake: False if the caller waits for it next.

    Raises:
        ValueError: No GPU could be chosen for this rank; an operation of this kind and name is in
            flight.
    """
    source, result = posting.source, posting.result
    if not source.is_cpu:
        return _begin_on_device(team, posting, source, result, wake)
    operation = team.post(posting, wake)
    if result is not None:
        return Handle(operation, result)
    dtype = source.dtype
    return Handle(operation, finish=lambda: gathered_result(operation, dtype))


def _begin_on_device(
    team: Team,
    posting: _core.Posting,
    source: torch.Tensor,
    result: torch.Tensor | None,
    wake: bool,
) -> Handle:
    by_queue = goes_by_gpu(source)
    dtype, device = source.dtype, source.device
    given = source.detach() if by_queue else gpu_pinning.to_host(source)
    if result is None:
        output = None
    elif result is source and not result.is_inference():
        output = given
    elif by_queue and not result.is_inference():
        output = result
    else:
        # A GPU queue's thread is not in inference mode, so it can't change an inference tensor.
        with torch.inference_mode(False):
            output = torch.empty(result.shape, dtype=dtype, device=given.device)
    if by_queue:
        transfer = queue_of(team).start(posting, given, output, wake)
        if result is None:
            return Handle(transfer, finish=transfer.value)
        if not result.is_inference():
            return Handle(transfer, result)
        operation: Any = transfer
    else:
        staged = posting.replace(source=given, result=output, place=_core.STAGED)
        operation = team.post(staged, wake)

    def finish() -> torch.Tensor:
        if result is None:
            return gathered_result(operation, dtype).to(device)
        assert output is not None
        with torch.no_grad():
            return result.copy_(output)

    return Handle(operation, finish=finish)
