"""Collectives of tensors that are not in host memory.

Those on a CUDA device go by the team's lane (`hvdlite.gpu`). What lies on another kind of device
is copied to host memory, takes part from there, and its result is copied back.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.handles import Handle
from hvdlite.collectives.posting import named
from hvdlite.gpu import lane_of, takes
from hvdlite.gpu.transfer import Request
from hvdlite.result_tensors import received
from hvdlite.world import gpu_pinning
from hvdlite.world.teams import Team

_ON_HOST = _core.ON_HOST


def start_into(
    team: Team,
    kind: int,
    source: torch.Tensor,
    result: torch.Tensor,
    name: str | None,
    code: int,
    op: int,
    root: int,
    prescale: float,
    postscale: float,
    wake: bool,
    group: tuple[int, int] | None = None,
) -> Handle:
    """Starts a collective whose result has its memory already, wherever the tensors lie.

    Arguments and errors as those of `start_on_device`.
    """
    if not source.is_cpu:
        return start_on_device(
            team,
            source,
            result,
            wake,
            kind,
            name,
            code,
            op,
            root,
            prescale,
            postscale,
            None,
            group,
        )
    name, unnamed = named(team, name)
    operation = team.post(
        kind,
        name,
        unnamed,
        code,
        op,
        root,
        source.data_ptr(),
        result.data_ptr(),
        source.shape,
        prescale,
        postscale,
        (source, result),
        wake,
        _ON_HOST,
        0,
        group,
    )
    return Handle(operation, result)


def start_on_device(
    team: Team,
    source: torch.Tensor,
    result: torch.Tensor | None,
    wake: bool,
    kind: int,
    name: str | None,
    code: int,
    op: int = 0,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: torch.Tensor | None = None,
    group: tuple[int, int] | None = None,
) -> Handle:
    """Starts a collective.

    Args:
        source: Contiguous, not a negated view.
        result: Where the result goes, on the same device; may be `source`. None for what gathers,
            whose result is made when its size is known.
        kind, code, op, root, prescale, postscale, group: In the words of `_core.Engine.post`.
        splits: alltoall: the rows for each member, int64, on the CPU.

    Raises:
        ValueError: A device that was not chosen for this rank.
    """
    by_lane = takes(source)
    dtype, device = source.dtype, source.device
    given = source.detach() if by_lane else gpu_pinning.to_host(source)
    if result is None:
        output = None
    elif result is source and not result.is_inference():
        output = given
    elif by_lane and not result.is_inference():
        output = result
    else:
        # Also because a lane's thread, which is not in inference mode, can't change what is.
        with torch.inference_mode(False):
            output = torch.empty(result.shape, dtype=dtype, device=given.device)
    name, unnamed = named(team, name)
    request = Request(
        kind, name, unnamed, code, op, root, prescale, postscale, splits=splits, group=group
    )
    if by_lane:
        transfer = lane_of(team).start(request, given, output, wake)
        if result is None:
            return Handle(transfer, finish=transfer.value)
        if not result.is_inference():
            return Handle(transfer, result)
        operation: Any = transfer
    else:
        operation = request.post(team, _core.STAGED, given.shape, given, output, wake)

    def finish() -> torch.Tensor:
        if result is None:
            return received(operation, dtype).to(device)
        assert output is not None
        with torch.no_grad():
            return result.copy_(output)

    return Handle(operation, finish=finish)
