"""Exchanges numbers of rows and other facts between the members of a queue, through the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hvdlite import _core
from hvdlite.errors import HorovodInternalError
from hvdlite.own_names import renamed
from hvdlite.result_tensors import gathered_result

if TYPE_CHECKING:
    from hvdlite.world.teams.team import Team


def gather_bytes(team: Team, name: str, payload: bytes) -> list[bytes]:
    """The payload of each member, in member order. Collective; blocks.

    Raises:
        HorovodInternalError: a member has left.
    """
    source = torch.tensor(list(payload), dtype=torch.uint8, device="cpu")
    operation = team.post(_core.posting(_core.ALLGATHER, name, False, _core.UINT8, source))
    text = operation.wait()
    if text is not None:
        raise HorovodInternalError(text)
    everything = bytes(gathered_result(operation, torch.uint8).tolist())
    parts = []
    for count in operation.rows():
        parts.append(everything[:count])
        everything = everything[count:]
    return parts


def post_counts(team: Team, request: _core.Posting, rows: int) -> _core.Operation:
    """Starts to exchange how many rows each member sends to this one.

    rows: this member's, which all others get (allgather).
    """
    ones = torch.ones(team.size, dtype=torch.int64, device="cpu")
    source = request.splits
    if source is None:
        source = torch.tensor([rows], dtype=torch.int64, device="cpu")
    return team.post(
        _core.posting(
            *(
                request.kind,
                renamed(request.name, f"{request.name} (rows)"),
                False,
                _core.INT64,
                source,
            ),
            splits=None if request.splits is None else ones,
        )
    )


def counts_of(operation: _core.Operation) -> tuple[int, ...]:
    """The result of `post_counts`, after it has ended well."""
    return tuple(gathered_result(operation, torch.int64).tolist())
