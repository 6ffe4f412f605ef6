"""One server, as a worker sees it: sends it gradients and takes parameters from it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch

from hvdlite.asynchronous import messages
from hvdlite.asynchronous.messages import (
    ABSENT,
    BODY_TAG,
    DENSE,
    REQUEST_TAG,
    BadMessage,
    Form,
    Header,
    Kind,
)
from hvdlite.asynchronous.parts import Layout
from hvdlite.asynchronous.served import Offer, SharedMemory
from hvdlite.tensor_bytes import flat_bytes
from hvdlite.world.teams.roles import Everyone
from hvdlite.world.teams.shared_memory import open_offer

Gradients = Sequence[torch.Tensor | None]


class ServerLink:
    """The connection of one optimizer on this worker with one server. Used by one thread."""

    def __init__(
        self,
        everyone: Everyone,
        server: int,
        number: int,
        layout: Layout,
        wait: Callable[[ServerLink, Any, bool], None],
    ) -> None:
        """server: its rank in the job. number: the optimizer's.
        wait: waits for an operation, and raises if it fails. It learns whether the server may
            wait for other workers."""
        self.server = server
        self.layout = layout
        self.name = everyone.name_of(server)
        self._engine = everyone.team.engine
        self._worker = everyone.roles.workers.index(everyone.team.rank)
        self._number = number
        self._digest = layout.digest()
        self._wait = wait
        self._memory: SharedMemory | None = None
        self._own_place: torch.Tensor | None = None
        # By part, where gradients are put together.
        self._gradients: list[torch.Tensor] = []
        # Where parameters come to lie: shared, or received.
        self._staging: torch.Tensor | None = None
        self._parameters: list[torch.Tensor] = []
        # Of the reply that is awaited: its header's receive.
        self._reply: tuple[Any, torch.Tensor] | None = None
        # The posted receive of parameters in the form WHOLE.
        self._whole: Any = None
        # What the last reply has brought, until it is loaded: its header, and what follows.
        self._arrived: tuple[Header, list[Any]] | None = None
        self._version = 0
        self._sent_options: list[dict[str, Any]] | None = None
        # The round, or the steps, that the last reply was about.
        self.clock = 0

    def set_up(self, record: Any, values: Sequence[torch.Tensor]) -> str | None:
        """Worker 0 gives the server an optimizer and the values of its parts. What went wrong
        there, in words."""
        failure: str | None = self._ask(Kind.SETUP, record, values)
        return failure

    def attach(self) -> None:
        """To be called once the server has the optimizer."""
        offer: Offer | None = self._ask(Kind.ATTACH)
        self._memory = None if offer is None else self._open(offer)
        if self._memory is None:
            place = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
            self._staging = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
            self._parameters = self.layout.views(self._staging)
            self._own_place = place
        else:
            place = self._memory.gradients[0]
            self._parameters = self.layout.views(self._memory.parameters)
        self._gradients = self.layout.views(place)

    def _open(self, offer: Offer) -> SharedMemory | None:
        descriptor = open_offer((offer.path, offer.nonce))
        if descriptor < 0:
            return None
        try:
            memory = SharedMemory(
                descriptor, offer.size_bytes, self.layout.size_bytes, len(offer.workers)
            )
        finally:
            os.close(descriptor)
        own = offer.workers.index(self._worker)
        memory.gradients = [memory.gradients[own]]
        return memory

    def push(
        self,
        gradients: Gradients,
        clock: int,
        needs: int,
        options: list[dict[str, Any]],
    ) -> None:
        """Sends gradients, by part; does not wait for the server. They may be changed afterwards.

        The previous push has been answered. clock: the step's, or the round's, number.
        needs: see `Header`; `take_reply` waits for it.
        """
        if options != self._sent_options:
            self._send_options(options)
        sparse = [gradient is not None and gradient.is_sparse for gradient in gradients]
        for place, gradient, is_sparse in zip(self._gradients, gradients, sparse, strict=True):
            if gradient is not None and not is_sparse:
                place.copy_(gradient)
        form = Form.PARTS
        if not any(sparse) and all(gradient is not None for gradient in gradients):
            form = Form.WHOLE if self._memory is None else Form.SHARED
        self._request(Kind.PUSH, form=form, clock=clock, needs=needs)
        if form is Form.WHOLE:
            self._send(BODY_TAG, self._own_place)
        elif form is Form.PARTS:
            self._send_parts(gradients)
        self._expect_reply()

    def _send_parts(self, gradients: Gradients) -> None:
        table: list[int] = []
        bodies: list[torch.Tensor] = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                table.append(ABSENT)
            elif gradient.is_sparse:
                table.append(gradient._nnz())
                bodies += [gradient.indices()[0].cpu(), gradient.values().cpu()]
            else:
                table.append(DENSE)
                bodies.append(self._gradients[index])
        self._send(BODY_TAG, torch.tensor(table, dtype=torch.int64))
        for body in bodies:
            self._send(BODY_TAG, body)

    def _send_options(self, options: list[dict[str, Any]]) -> None:
        self._request(Kind.OPTIONS, options)
        self._sent_options = options

    def forget_options(self) -> None:
        """The server has got an optimizer's state anew: the next push carries the options."""
        self._sent_options = None

    def _expect_reply(self) -> None:
        """Its receives are posted before it comes, so that it comes while this worker computes."""
        header = messages.empty_header()
        receive = self._engine.recv(header, self.server, messages.step_tag(self._number))
        self._reply = receive, header
        if self._staging is not None and self._whole is None:
            tag = messages.whole_tag(self._number)
            self._whole = self._engine.recv(self._staging, self.server, tag)

    @property
    def is_awaited(self) -> bool:
        return self._reply is not None

    def take_reply(self) -> None:
        """Waits for what the last push has asked for; does nothing if that has come."""
        if self._reply is None:
            return
        receive, tensor = self._reply
        self._wait(self, receive, True)
        self._reply = None
        header = messages.read_header(tensor, self._worker)
        if header.kind is not Kind.STEP or header.digest != self._digest:
            raise BadMessage(f"{self.name} sent {header.kind.name} of another layout")
        following: list[Any] = []
        if header.form is Form.WHOLE:
            whole, self._whole = self._whole, None
            self._wait(self, whole, False)
        elif header.form is Form.PARTS:
            following = self._receive_parts()
        self.clock = header.clock
        self._arrived = header, following

    def _receive_parts(self) -> list[Any]:
        """By part: None, a tensor, or the rows and their values."""
        following: list[Any] = []
        table = self._receive_as(torch.empty(len(self.layout.parts), dtype=torch.int64)).tolist()
        for part, entry in zip(self.layout.parts, table, strict=True):
            if entry == ABSENT or entry == 0:
                following.append(None)
            elif entry == DENSE:
                following.append(self._receive_as(torch.empty(part.shape, dtype=part.dtype)))
            else:
                if not 0 < entry <= part.shape[0]:
                    raise BadMessage(f"{self.name} sent {entry} rows of {part.name!r}")
                rows = self._receive_as(torch.empty(entry, dtype=torch.int64))
                values = torch.empty((entry, *part.shape[1:]), dtype=part.dtype)
                following.append((rows, self._receive_as(values)))
        return following

    def _receive_as(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            memory = tensor.view(-1).view(torch.uint8)
            tag = messages.parts_tag(self._number)
            self._wait(self, self._engine.recv(memory, self.server, tag, "", False), False)
        return tensor

    @property
    def has_arrived(self) -> bool:
        """Whether a reply was taken, and not loaded yet."""
        return self._arrived is not None

    def load(self, targets: Sequence[torch.Tensor]) -> None:
        """Copies what the last reply has brought into the parameters: by part, the places there."""
        if self._arrived is None:
            return
        (header, following), self._arrived = self._arrived, None
        if header.version < self._version:
            return  # newer ones have been pulled meanwhile
        self._version = header.version
        if header.form is not Form.PARTS:
            for target, parameter in zip(targets, self._parameters, strict=True):
                target.copy_(parameter)
            return
        for target, found in zip(targets, following, strict=True):
            if isinstance(found, tuple):
                rows, values = found
                target[rows.to(target.device)] = values.to(target.device)
            elif found is not None:
                target.copy_(found)

    def pull(self, targets: Sequence[torch.Tensor]) -> None:
        """Copies the newest parameters into the places: at least with all that this worker has
        sent."""
        header, parameters = self._newest()
        self._version = header.version
        for target, parameter in zip(targets, parameters, strict=True):
            target.copy_(parameter)

    def _newest(self) -> tuple[Header, list[torch.Tensor]]:
        """The newest parameters, by part."""
        self._request(Kind.PULL)
        header = messages.read_header(
            self._receive(messages.answer_tag(self._number), messages.empty_header()), self._worker
        )
        memory = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
        self._receive(messages.answer_body_tag(self._number), memory)
        return header, self.layout.views(memory)

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state, by part."""
        state: list[dict[str, Any]] = self._ask(Kind.STATE)
        return state

    def load_state(self, state: list[dict[str, Any]], values: Sequence[torch.Tensor]) -> str | None:
        """What went wrong there, in words: then the server keeps what it had."""
        failure: str | None = self._ask(Kind.LOAD, cloudpickle.dumps(state), values)
        return failure

    def look(self) -> dict[str, Any]:
        """Who has made how many steps."""
        found: dict[str, Any] = self._ask(Kind.LOOK)
        return found

    def tell(self, kind: Kind) -> None:
        """Sends a message without an answer."""
        self._request(kind)

    def _ask(self, kind: Kind, body: Any = None, values: Sequence[torch.Tensor] = ()) -> Any:
        self._request(kind, body)
        if values:
            memory = torch.zeros(self.layout.size_bytes, dtype=torch.uint8)
            for place, value in zip(self.layout.views(memory), values, strict=True):
                place.copy_(value)
            self._send(BODY_TAG, memory)
        elif kind in (Kind.SETUP, Kind.LOAD):
            self._send(BODY_TAG, torch.zeros(self.layout.size_bytes, dtype=torch.uint8))
        tag = messages.answer_tag(self._number)
        header = messages.read_header(self._receive(tag, messages.empty_header()), self._worker)
        answer = torch.empty(header.body_bytes, dtype=torch.uint8)
        self._receive(messages.answer_body_tag(self._number), answer)
        return pickle.loads(answer.numpy().data)

    def _request(
        self,
        kind: Kind,
        body: Any = None,
        form: Form = Form.NOTHING,
        clock: int = 0,
        needs: int = 0,
    ) -> None:
        data = None if body is None else messages.bytes_tensor(cloudpickle.dumps(body))
        header = Header(
            *(kind, self._worker, self._number, form, len(self.layout.parts), self._digest),
            clock=clock,
            needs=needs,
            body_bytes=0 if data is None else data.numel(),
        )
        self._send(REQUEST_TAG, header.tensor())
        if data is not None:
            self._send(BODY_TAG, data)

    def _send(self, tag: int, tensor: torch.Tensor | None) -> None:
        """The engine keeps the tensor until it has gone."""
        assert tensor is not None
        if tensor.numel():
            self._engine.send(flat_bytes(tensor), self.server, tag)

    def _receive(self, tag: int, tensor: torch.Tensor) -> torch.Tensor:
        self._wait(self, self._engine.recv(tensor, self.server, tag, "", False), False)
        return tensor
