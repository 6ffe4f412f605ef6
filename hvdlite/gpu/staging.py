"""Takes a transfer through host memory: copies it there, posts it to the engine, copies it back.

For ranks that share a GPU, and for operations that NCCL does not have.

    copies out    | piece 0 | piece 1 | piece 2 |
    engine                  |   piece 0   |   piece 1   |   piece 2   |
    copies back                           | piece 0 |    | piece 1 |    | piece 2 |

A large allreduce or broadcast goes in pieces, so that its copies and the engine's work overlap.
Each direction has a track of its own. A small tensor is one piece, and takes the calling thread's
own stream where that is possible: fewer steps, and too short to hold up what comes behind.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from hvdlite import _core
from hvdlite.gpu.devices import Devices, Mark
from hvdlite.gpu.host_buffers import HostBuffers
from hvdlite.gpu.transfer import Transfer
from hvdlite.own_names import renamed
from hvdlite.result_tensors import gathered_result

if TYPE_CHECKING:
    from hvdlite.world.teams.team import Team

# What to tune by measuring on a GPU; each is the same on all ranks. A piece has about so many
# bytes: the first copy out and the last copy back overlap with nothing.
PIECE_BYTES = 16 * 1024 * 1024
# Up to so many the copies are queued on the calling thread's stream.
SMALL_BYTES = 1024 * 1024
# Pinned memory that a queue keeps while no transfer needs it.
KEPT_BYTES = 512 * 1024 * 1024


class Tracks:
    """What the stagings of one device share."""

    def __init__(self, team: Team, devices: Devices, device: torch.device, buffers: HostBuffers):
        self.team = team
        self.devices = devices
        self.buffers = buffers
        self.outward = devices.track(device)
        self.inward = devices.track(device)


class _Piece:
    """A range of elements, or a whole transfer."""

    __slots__ = ("begin", "copied", "end", "operation", "output", "posting")

    def __init__(
        self, posting: _core.Posting, output: torch.Tensor | None, begin: int = 0, end: int = -1
    ) -> None:
        self.posting = posting
        # Where the engine puts the result; None if it makes the memory.
        self.output = output
        # The elements; all if the end is -1.
        self.begin, self.end = begin, end
        # When the copy to the host is done.
        self.copied: Mark | None = None
        self.operation: _core.Operation | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.end < 0 else tensor.view(-1)[self.begin : self.end]


class Staging:
    """One transfer that passes through host memory."""

    def __init__(self, tracks: Tracks, transfer: Transfer, is_callers: bool) -> None:
        """Starts the copy to the host. is_callers: the calling thread has called the collective;
        what is small is copied on its stream."""
        tensor, request = transfer.tensor, transfer.request
        assert tensor is not None
        self._tracks = tracks
        self._transfer = transfer
        # Held while pieces are posted, or copied back; never while something is waited for.
        self._moving = threading.Lock()
        self._num_posted = 0
        self._num_back = 0
        self._is_small = tensor.nbytes <= SMALL_BYTES
        self._buffers: list[torch.Tensor] = []
        self.failure: str | None = None
        source = self._borrow(tensor)
        output: torch.Tensor | None = source
        if transfer.gathers:
            output = None
        elif _core.KINDS[request.kind].shares:
            assert transfer.result is not None
            output = self._borrow(transfer.result)
        request = request.replace(place=_core.STAGED, source=source, result=output)
        if transfer.awaited is None and is_callers:
            # This is what the members compare.
            self._pieces = [_Piece(request, output)]
        else:
            self._pieces = _cut(tracks.team, request, source, output)
        self._copy_out(tensor, source, is_callers and self._is_small)

    def _borrow(self, like: torch.Tensor) -> torch.Tensor:
        buffer = self._tracks.buffers.take(like.nbytes)
        self._buffers.append(buffer)
        return buffer[: like.nbytes].view(like.dtype).view(like.shape)

    def _copy_out(self, tensor: torch.Tensor, source: torch.Tensor, is_callers: bool) -> None:
        devices, outward, transfer = self._tracks.devices, self._tracks.outward, self._transfer
        if is_callers:
            devices.copy(source, tensor)
            self._pieces[0].copied = transfer.ready = devices.ready(tensor)
            return
        if transfer.ready is None:
            transfer.ready = devices.ready(tensor)
        with outward.behind(transfer.ready):
            for piece in self._pieces:
                devices.copy(piece.of(source), piece.of(tensor))
                piece.copied = outward.mark()
        outward.keep(tensor)

    def uncopied(self) -> Mark | None:
        """When the next piece can be posted; None: all are."""
        posted, pieces = self._num_posted, self._pieces
        return pieces[posted].copied if posted < len(pieces) else None

    def post(self, wake: bool = True) -> None:
        """Posts the pieces that are copied. wake: False where the caller then waits for the last.

        Raises:
            RuntimeError: the engine is closed.
        """
        with self._moving:
            while (copied := self.uncopied()) is not None and copied.query():
                piece = self._pieces[self._num_posted]
                # First, so that it is not posted again if a signal handler raises here.
                self._num_posted += 1
                is_last = self._num_posted == len(self._pieces)
                piece.operation = self._tracks.team.post(piece.posting, wake or not is_last)

    def in_engine(self) -> _core.Operation | None:
        """The operation that must end next."""
        back, pieces = self._num_back, self._pieces
        return pieces[back].operation if back < len(pieces) else None

    def take_back(self, is_callers: bool = False) -> bool:
        """Copies back the pieces that are reduced. Whether it is finished: all are queued, or one
        has failed. is_callers: as in the constructor."""
        with self._moving:
            while self._pieces and self._num_back < self._num_posted and self.failure is None:
                piece = self._pieces[self._num_back]
                if piece.operation is None:
                    raise RuntimeError("an exception has interrupted its start")
                if not piece.operation.poll():
                    return False
                self._take(piece, piece.operation, is_callers and self._is_small)
            if self._num_back < len(self._pieces) and self.failure is None:
                return False
            if self._buffers and self.failure is None:
                self._give_back(is_callers and self._is_small)
            # After a failure the engine may still write to them.
            self._buffers, self._pieces = [], []
            return True

    def _take(self, piece: _Piece, operation: _core.Operation, is_callers: bool) -> None:
        failure = operation.wait()
        if failure is not None and lacks_data(failure):
            piece.posting = _afresh(piece.posting)
            piece.operation = self._tracks.team.post(piece.posting)
            return
        if failure is None:
            self._copy_back(piece, operation, is_callers)
            self._num_back += 1
        self.failure = failure

    def _copy_back(self, piece: _Piece, operation: _core.Operation, is_callers: bool) -> None:
        transfer, output = self._transfer, piece.output
        devices, inward = self._tracks.devices, self._tracks.inward
        tensor = transfer.tensor
        assert tensor is not None
        if output is None:
            transfer.counts = operation.rows()
            output = gathered_result(operation, tensor.dtype)
        if is_callers:
            _put(devices, transfer, piece, output)
            return
        with inward.behind(transfer.ready):
            _put(devices, transfer, piece, output)

    def _give_back(self, is_callers: bool) -> None:
        transfer, inward = self._transfer, self._tracks.inward
        assert transfer.result is not None
        if is_callers:
            transfer.done = self._tracks.devices.ready(transfer.result)
        else:
            inward.keep(transfer.result)
            transfer.done = inward.mark()
        for buffer in self._buffers:
            self._tracks.buffers.give_back(buffer, transfer.done)


def goes_in_pieces(team: Team, request: _core.Posting, tensor: torch.Tensor) -> bool:
    """The same on all members that agree on the request."""
    return _num_pieces(team, request, tensor)[0] > 1


def lacks_data(failure: str) -> bool:
    """Whether an operation has failed only because some members posted its data, and others did not
    know yet that all is staged. It is then posted afresh."""
    return failure.endswith(_core.SOME_WITHOUT_DATA)


def _afresh(posting: _core.Posting) -> _core.Posting:
    return posting.replace(name=renamed(posting.name, f"{posting.name} (staged)"), unnamed=False)


def _num_pieces(team: Team, request: _core.Posting, tensor: torch.Tensor) -> tuple[int, int]:
    """How many, and how many bytes one has. The last one takes what is left."""
    if tensor.nbytes < 2 * PIECE_BYTES:
        return 1, tensor.nbytes
    is_alike = request.kind in (_core.ALLREDUCE, _core.BROADCAST) and request.op != _core.ADASUM
    unit = team.engine.cut_bytes() if is_alike else 0
    if not unit:
        return 1, tensor.nbytes
    piece_bytes = -(-PIECE_BYTES // unit) * unit
    return max(1, tensor.nbytes // piece_bytes), piece_bytes


def _cut(
    team: Team, request: _core.Posting, source: torch.Tensor, output: torch.Tensor | None
) -> list[_Piece]:
    """The pieces of a transfer that its members agree on already."""
    num, piece_bytes = _num_pieces(team, request, source)
    if num == 1 or output is None:
        return [_Piece(_afresh(request), output)]
    elems = piece_bytes // source.element_size()
    pieces = []
    for i in range(num):
        begin, end = i * elems, (i + 1) * elems if i + 1 < num else source.numel()
        part, result = source.view(-1)[begin:end], output.view(-1)[begin:end]
        posting = request.replace(
            name=renamed(request.name, f"{request.name} (staged, piece {i + 1} of {num})"),
            unnamed=False,
            source=part,
            result=result,
            group=None,
        )
        pieces.append(_Piece(posting, result, begin, end))
    return pieces


def _put(devices: Devices, transfer: Transfer, piece: _Piece, output: torch.Tensor) -> None:
    if transfer.result is None:
        assert transfer.tensor is not None
        # A result of a caller in inference mode is none of its tensors, as by NCCL.
        with torch.inference_mode(False):
            transfer.result = torch.empty_like(output, device=transfer.tensor.device)
    devices.copy(piece.of(transfer.result), output)
