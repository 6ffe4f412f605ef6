"""A server's receivers: a thread for each worker, which takes in what that worker sends.

Receivers only receive. They put complete requests into one queue, in the order in which they come,
and one thread does what they ask for.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.asynchronous.messages import (
    ABSENT,
    BODY_TAG,
    DENSE,
    REQUEST_TAG,
    BadMessage,
    Form,
    Header,
    Kind,
    empty_header,
    read_header,
)
from hvdlite.asynchronous.served import Push, Served
from hvdlite.asynchronous.turns import Turns
from hvdlite.world.teams.team import Team


class Lost(RuntimeError):
    """A message did not come, or can't be used. The text says why."""


@dataclass(frozen=True)
class Request:
    """worker: its number. body: what the pickle says; of a PUSH a `Push`. values: what follows."""

    worker: int
    header: Header
    body: Any = None
    values: torch.Tensor | None = None


@dataclass(frozen=True)
class Failure:
    """A receiver has ended with an error. source: the rank from which it receives."""

    source: int
    error: BaseException


def receive(team: Team, source: int, tag: int, tensor: torch.Tensor) -> torch.Tensor:
    """Waits for a message, which is as large as the tensor.

    Raises:
        Lost: It will not come.
    """
    failure = team.engine.recv(tensor, source, tag, "", False).wait()
    if failure is not None:
        raise Lost(failure)
    return tensor


class Receiver:
    """Takes in what one worker sends; or, as worker 0's, what the first server tells the others."""

    def __init__(
        self,
        team: Team,
        rank: int,
        worker: int,
        served: Mapping[int, Served],
        inbox: queue.SimpleQueue[Request | Failure],
        turns: Turns,
    ) -> None:
        """rank: the worker's rank in the team. served: by number; others add to it. turns: of all
        receivers of this server."""
        self._team = team
        self._rank = rank
        self._worker = worker
        self._served = served
        self._inbox = inbox
        self._turns = turns
        self.thread = threading.Thread(
            target=self._run, name=f"hvdlite-from-worker-{worker}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        try:
            kind = None
            while kind not in (Kind.BYE, Kind.END):
                header = read_header(self._receive(REQUEST_TAG, empty_header()), self._worker)
                kind = header.kind
                self._inbox.put(self._rest(header))
        except BaseException as error:
            self._inbox.put(Failure(self._rank, error))

    def _rest(self, header: Header) -> Request:
        if header.kind is Kind.PUSH:
            return Request(self._worker, header, self._push(header))
        if header.kind is Kind.PULL:
            self._served_of(header)
        body: Any = None
        values: torch.Tensor | None = None
        if header.body_bytes:
            body = pickle.loads(
                self._body(torch.empty(header.body_bytes, dtype=torch.uint8)).numpy().data
            )
        if header.kind in (Kind.SETUP, Kind.LOAD):
            layout = body.layout if header.kind is Kind.SETUP else self._served_of(header).layout
            values = self._body(torch.empty(layout.size_bytes, dtype=torch.uint8))
        return Request(self._worker, header, body, values)

    def _push(self, header: Header) -> Push:
        served = self._served_of(header)
        layout = served.layout
        push = Push(self._worker, header.clock, header.needs)
        place = served.place_for(self._worker)
        gradients = layout.views(place)
        offer = served.offer
        if header.form is Form.SHARED and (offer is None or self._worker not in offer.workers):
            raise BadMessage(f"worker {self._worker} shares no memory with this server")
        if header.form in (Form.SHARED, Form.WHOLE):
            if header.form is Form.WHOLE:
                self._wait_for_turn()
                self._body(place)
                self._turns.end(self._worker)
            push.dense = dict(enumerate(gradients))
            return push
        table = self._body(torch.empty(len(gradients), dtype=torch.int64)).tolist()
        for index, entry in enumerate(table):
            if entry == DENSE:
                push.dense[index] = _into(self._body, gradients[index])
            elif entry != ABSENT:
                push.rows[index] = self._rows(served, index, entry)
        return push

    def _rows(self, served: Served, index: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = served.layout.parts[index]
        limit = part.shape[0] if part.shape else 0
        if not 0 <= count <= limit:
            raise BadMessage(f"{count} rows of a gradient of {part.name!r}, which has {limit} here")
        rows = torch.empty(count, dtype=torch.int64)
        values = torch.empty((count, *part.shape[1:]), dtype=part.dtype)
        if count:
            self._body(rows)
            if int(rows[0]) < 0 or int(rows[-1]) >= limit or not bool((rows[1:] > rows[:-1]).all()):
                raise BadMessage(
                    f"rows of a gradient of {part.name!r} that do not ascend from 0 to {limit - 1}"
                )
            _into(self._body, values)
        return rows, values

    def _served_of(self, header: Header) -> Served:
        served = self._served.get(header.optimizer)
        if served is None:
            raise BadMessage(
                f"worker {self._worker} sends {header.kind.name} for optimizer {header.optimizer}, "
                "which this server does not have"
            )
        if (header.parts, header.digest) != (len(served.params), served.digest):
            raise BadMessage(
                f"worker {self._worker} has another layout of optimizer {header.optimizer}: "
                f"{header.parts} parts, and this server has {len(served.params)}"
            )
        return served

    def _receive(self, tag: int, tensor: torch.Tensor) -> torch.Tensor:
        return receive(self._team, self._rank, tag, tensor)

    def _wait_for_turn(self) -> None:
        self._turns.begin(self._worker)

    def _body(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._receive(BODY_TAG, tensor)


def _into(receive_body: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Receives a contiguous tensor, of any dtype; one without elements does not travel."""
    if tensor.numel():
        receive_body(tensor.view(-1).view(torch.uint8))
    return tensor
