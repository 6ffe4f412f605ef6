"""The parts that have their home on this host: where they lie, and what its workers note of them.

Without servers the parameters lie once on each host. Each part has a home: there its workers change
it in place. The other hosts have a copy, which the home's answers renew.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvdlite.asynchronous.messages import Kind
from hvdlite.asynchronous.parts import Layout
from hvdlite.asynchronous.served import Push, Record, Served
from hvdlite.asynchronous.server_link import ServerLink
from hvdlite.shared.memory import Region

# Is added to the clock of a worker that does not count: one that has joined or left.
AWAY = 1 << 62


class Clocks:
    """The clocks of all workers, in memory that the workers of a host share.

    Invariant: the parts at home on this host contain the first `clocks[w]` steps of worker w. The
    clock is written after the parts: by the worker itself if it is on this host, else by the
    thread that applies its gradients.
    """

    def __init__(self, clocks: torch.Tensor) -> None:
        self._clocks = clocks

    def made(self) -> list[int]:
        return [made % AWAY for made in self._clocks.tolist()]

    def counted(self) -> list[int]:
        """The workers that the others wait for."""
        return [worker for worker, made in enumerate(self._clocks.tolist()) if made < AWAY]

    def holds(self, needs: int) -> bool:
        """Whether the parts contain the first `needs` steps of every worker that counts."""
        return int(self._clocks.min()) >= needs

    def are_behind(self, workers: torch.Tensor, needs: int) -> bool:
        """Whether one of these has not made so many steps."""
        return bool((self._clocks[workers] < needs).any())

    def set(self, worker: int, made: int) -> None:
        """The worker counts, with so many steps."""
        self._clocks[worker] = made

    def leave(self, worker: int) -> None:
        """The worker does not count any more."""
        self._clocks[worker] = AWAY + int(self._clocks[worker]) % AWAY


class Marks:
    """What the workers of this host have changed at home, until the thread that answers the other
    hosts has noted it: bytes that are 1. For each part: whether all of it has, whether some rows
    have; and for each row.

    No change is lost: a worker writes values, then marks; the thread clears a mark before it reads
    the values. (Between the two, torch's atomic counts of references keep the order.)
    """

    def __init__(self, memory: torch.Tensor, layout: Layout) -> None:
        num = len(layout.parts)
        self._whole = memory[:num]
        self._some = memory[num : 2 * num]
        self._rows: list[torch.Tensor] = []
        begin = 2 * num
        for part in layout.parts:
            self._rows.append(memory[begin : begin + part.end - part.begin])
            begin += part.end - part.begin

    @staticmethod
    def size_bytes(layout: Layout) -> int:
        return sum(2 + part.end - part.begin for part in layout.parts)

    def mark(self, push: Push) -> None:
        for index in push.dense:
            self._whole[index] = 1
        for index, (rows, _) in push.rows.items():
            self._rows[index][rows] = 1
            self._some[index] = 1

    def take(self) -> tuple[list[int], dict[int, torch.Tensor]]:
        """The parts that have changed as a whole, and by part the rows that have. Clears them."""
        whole = _clear(self._whole)
        rows_by_part = {index: _clear(self._rows[index]) for index in _clear(self._some).tolist()}
        return whole.tolist(), rows_by_part


def _clear(marks: torch.Tensor) -> torch.Tensor:
    """Clears the marks that it finds; their indices."""
    # Of a copy: nonzero reads its tensor twice, and writes beyond its result if more are marked
    # meanwhile.
    found = marks.clone().nonzero().view(-1)
    marks[found] = 0
    return found


class OwnHome(Served):
    """The parts at home on this host, with the own optimizer of a worker of this host."""

    def __init__(self, record: Record, params: Sequence[torch.Tensor], marks: Marks) -> None:
        """params: the parts, in the shared parameters."""
        super().__init__(record, (), params)
        self._marks = marks

    def step(self, push: Push, options: list[dict[str, Any]]) -> None:
        """A step of this worker."""
        self.set_options(push.worker, options)
        self.apply(push)
        self._marks.mark(push)

    def _note_rows(self, index: int, rows: torch.Tensor) -> None:
        """The marks say it."""


class Home(Served):
    """The parts at home on this host, with the optimizer for the gradients of other hosts."""

    def __init__(self, record: Record, params: Sequence[torch.Tensor], marks: Marks) -> None:
        """params: the parts, in the shared parameters."""
        super().__init__(record, (), params)
        self._marks = marks

    def news(self, known: int) -> tuple[list[int], dict[int, torch.Tensor]]:
        """As of `Served`, with what the workers of this host have changed. Each answer has a
        version of its own."""
        self.version += 1
        whole, rows_by_part = self._marks.take()
        for index in whole:
            self._changed[index] = self.version
        for index, rows in rows_by_part.items():
            self._note_rows(index, rows)
        return super().news(known)

    def snapshot(self) -> torch.Tensor:
        """The values of all parts, one after the other. Workers of this host may change them
        meanwhile: so it may contain a later step in part."""
        memory = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
        for place, param in zip(self.layout.views(memory), self.params, strict=True):
            place.copy_(param)
        return memory


class Copies:
    """This host's copies of the parts of other hosts.

    Invariant: the copy of home h's parts contains all that h's answer number `versions[h]`
    contained. Several workers write it, each what it has got: under a lock, and only what is newer.
    The lock is the kernel's, so it ends with the process that holds it.
    """

    def __init__(self, versions: torch.Tensor, region: Region) -> None:
        """versions: int64, by host, in the region, which workers of this host share."""
        self.versions = versions
        self._region = region

    @contextlib.contextmanager
    def locked(self, host: int) -> Iterator[None]:
        descriptor = self._region.descriptor
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, host)
        try:
            yield
        finally:
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, host)


class HomeLink(ServerLink):
    """The connection of one optimizer on this worker with another host, the home of some parts."""

    def __init__(self, copies: Copies, host: int, *arguments: Any) -> None:
        """host: the other one's index. arguments: those of `ServerLink`."""
        super().__init__(*arguments)
        self._copies = copies
        self._host = host

    def load(self, targets: Sequence[torch.Tensor]) -> None:
        """Copies what the last reply has brought into the parameters, if it is newer than what
        another worker of this host has copied there."""
        if not self.has_arrived:
            return
        with self._copies.locked(self._host):
            self._version = int(self._copies.versions[self._host])
            super().load(targets)
            self._copies.versions[self._host] = self._version

    def pull(self, targets: Sequence[torch.Tensor]) -> None:
        header, parameters = self._newest()
        with self._copies.locked(self._host):
            if header.version > int(self._copies.versions[self._host]):
                for target, parameter in zip(targets, parameters, strict=True):
                    target.copy_(parameter)
                self._copies.versions[self._host] = header.version

    def resume(self, clock: int) -> None:
        """All workers have joined: this one counts again, with so many steps. Returns when it
        does."""
        self._request(Kind.RESUME, clock=clock)
        self.look()

    def is_newer(self, version: int) -> None:
        """The copy gets the home's values by another way, as they are at this version."""
        with self._copies.locked(self._host):
            self._copies.versions[self._host] = version
