"""Serves the parts at home on this host to the workers of other hosts.

A thread of the host's first worker, and a receiver for each worker of another host. The thread
applies gradients where the parts lie, in the order in which they come, and answers with the parts'
values. It waits for no worker: what it can't answer yet, it keeps. The workers of its own host send
it nothing: it looks at their clocks while one of them keeps an answer back.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from hvdlite.asynchronous import messages
from hvdlite.asynchronous.homes import Clocks, Home
from hvdlite.asynchronous.messages import DENSE, Form, Header, Kind
from hvdlite.asynchronous.receiving import Failure, Lost, Receiver, Request
from hvdlite.asynchronous.served import Served
from hvdlite.asynchronous.turns import Turns
from hvdlite.world.teams.roles import Everyone

log = logging.getLogger("hvdlite")

_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 1e-3
# For a receiver that has got its last message.
_END_LIMIT_S = 5.0


class Task:
    """One optimizer at its home: the parts, and who waits for them."""

    def __init__(self, home: Home, clocks: Clocks, failed: torch.Tensor) -> None:
        """failed: one byte or number that this host's workers share: not 0 once serving failed."""
        self.home = home
        self.clocks = clocks
        self.failed = failed
        # By worker: how many steps of each worker the parameters must contain that it waits for.
        self.waiting: dict[int, int] = {}
        # By worker: the version that it got last.
        self.known = [0] * home.record.num_workers
        # The workers of other hosts that may send something.
        self.users: set[int] = set()


@dataclass(frozen=True)
class _Finish:
    """This worker leaves, and waits until the thread has ended: when all others have left too, or
    only released what they use here."""

    when_all_left: bool


class _Stop:
    """The process is about to fail."""


class _GatedReceiver(Receiver):
    """Works only while it has the gate, which it gives away while it waits. So who takes the gate
    and keeps it stops all receivers at a place where Python can end."""

    def __init__(self, gate: threading.Lock, *arguments: Any) -> None:
        """arguments: those of `Receiver`."""
        self._gate = gate
        super().__init__(*arguments)

    def _run(self) -> None:
        with self._gate:
            super()._run()

    def _receive(self, tag: int, tensor: torch.Tensor) -> torch.Tensor:
        self._gate.release()
        try:
            return super()._receive(tag, tensor)
        finally:
            self._gate.acquire()

    def _wait_for_turn(self) -> None:
        self._gate.release()
        try:
            super()._wait_for_turn()
        finally:
            self._gate.acquire()


class HomeServer:
    """Serves until `finish`, and then until no other host uses an optimizer of here."""

    def __init__(self, everyone: Everyone) -> None:
        self._everyone = everyone
        self._team = everyone.team
        own_host = everyone.host_of(self._team.rank)
        self._others = [w for w in everyone.roles.workers if everyone.host_of(w) != own_host]
        self._local = torch.tensor(everyone.placement.hosts[own_host])
        self._tasks: dict[int, Task] = {}
        self._served: dict[int, Served] = {}
        self._gone: set[int] = set()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._receivers: list[Receiver] = []
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hvdlite-home-server", daemon=True)
        self._thread.start()

    def add(self, task: Task) -> None:
        """Before any worker of another host sends something for it."""
        number = task.home.record.number
        task.users = {worker for worker in self._others if worker not in self._gone}
        self._served[number] = task.home
        self._tasks[number] = task

    def finish(self, when_all_left: bool) -> None:
        """Waits until all workers of other hosts have left, or have at least released this host's
        optimizers; or until serving has failed."""
        self._inbox.put(_Finish(when_all_left))
        self._thread.join()
        if when_all_left:
            # Python is about to end, see `stop`. A goodbye, or a failure, has ended each of them.
            for receiver in self._receivers:
                receiver.thread.join(_END_LIMIT_S)

    def stop(self) -> None:
        """Serves no more; the others are told nothing. Python is about to end: it ends threads that
        still run by force, and inside torch that would be an abort."""
        self._inbox.put(_Stop())
        self._thread.join(_END_LIMIT_S)
        self._gate.acquire(timeout=_END_LIMIT_S)  # for good

    def _run(self) -> None:
        turns = Turns(len(self._others))
        self._receivers += [
            _GatedReceiver(self._gate, self._team, worker, worker, self._served, self._inbox, turns)
            for worker in self._others
        ]
        try:
            self._serve()
        except BaseException as error:
            text = f"{self._everyone.name_of(self._team.rank)} failed: {_text_of(error)}"
            log.debug("%s", text, exc_info=True)
            # If a rank has died or left, all have that text before this one.
            self._team.engine.give_up(text)
            for task in list(self._tasks.values()):
                task.failed.fill_(1)

    def _serve(self) -> None:
        finish: _Finish | None = None
        while finish is None or self._is_needed(finish):
            request = self._next()
            if isinstance(request, _Stop):
                return
            if isinstance(request, Failure):
                sender = self._everyone.name_of(request.source)
                raise Lost(f"receiving from {sender}: {_text_of(request.error)}") from request.error
            if isinstance(request, _Finish):
                finish = request
            else:
                self._handle(request)

    def _is_needed(self, finish: _Finish) -> bool:
        return bool(self._tasks) or (finish.when_all_left and len(self._gone) < len(self._others))

    def _next(self) -> Any:
        """The next request. Meanwhile, what workers of this host make possible is answered."""
        pause_s = _FIRST_PAUSE_S
        while any(self._is_kept_back(task) for task in list(self._tasks.values())):
            try:
                return self._inbox.get(timeout=pause_s)
            except queue.Empty:
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            for task in list(self._tasks.values()):
                self._go_on(task)
        return self._inbox.get()

    def _is_kept_back(self, task: Task) -> bool:
        """Whether a worker of this host keeps back an answer: its next step comes without a
        message. It may also just have made it: then the answer is due now."""
        return bool(task.waiting) and (
            task.clocks.are_behind(self._local, max(task.waiting.values()))
            or task.clocks.holds(min(task.waiting.values()))
        )

    def _handle(self, request: Request) -> None:
        kind, worker, number = request.header.kind, request.worker, request.header.optimizer
        if kind is Kind.BYE:
            self._gone.add(worker)
            for each in list(self._tasks):
                self._release(each, worker)
            return
        task = self._tasks.get(number)
        if task is None:
            raise messages.BadMessage(f"{kind.name} of worker {worker} for no optimizer {number}")
        if kind is Kind.PUSH:
            task.home.apply(request.body)
            task.clocks.set(worker, request.header.clock + 1)
            task.waiting[worker] = request.header.needs
            self._go_on(task)
        elif kind is Kind.PULL:
            self._send_newest(task, worker)
        elif kind is Kind.OPTIONS:
            task.home.set_options(worker, request.body)
        elif kind is Kind.JOIN:
            task.clocks.leave(worker)
            self._go_on(task)
        elif kind is Kind.RESUME:
            task.clocks.set(worker, request.header.clock)
        elif kind is Kind.RELEASE:
            self._release(number, worker)
        else:
            self._answer(request, self._reply(task, request))

    def _reply(self, task: Task, request: Request) -> Any:
        kind = request.header.kind
        if kind is Kind.ATTACH:
            return None  # no memory is shared with other hosts
        if kind is Kind.STATE:
            return task.home.state()
        if kind is Kind.LOOK:
            return {"made": task.clocks.made(), "counted": task.clocks.counted(), "given": []}
        raise messages.BadMessage(f"{kind.name} from worker {request.worker}")

    def _release(self, number: int, worker: int) -> None:
        """The worker does not use this optimizer any more."""
        task = self._tasks[number]
        task.clocks.leave(worker)
        task.waiting.pop(worker, None)
        task.users.discard(worker)
        self._go_on(task)
        if not task.users:
            del self._tasks[number], self._served[number]

    def _go_on(self, task: Task) -> None:
        """Answers where the parameters contain by now what they must."""
        for worker, needs in list(task.waiting.items()):
            if task.clocks.holds(needs):
                del task.waiting[worker]
                self._send_step(task, worker)

    def _send_step(self, task: Task, worker: int) -> None:
        """What has changed since the worker's last answer."""
        home, number = task.home, task.home.record.number
        table, rows_by_part = home.news(task.known[worker])
        task.known[worker] = home.version
        form = Form.WHOLE if all(entry == DENSE for entry in table) else Form.PARTS
        self._send(worker, messages.step_tag(number), self._header(task, worker, form))
        if form is Form.WHOLE:
            self._send(worker, messages.whole_tag(number), home.snapshot())
            return
        tag = messages.parts_tag(number)
        self._send(worker, tag, torch.tensor(table, dtype=torch.int64))
        for index, entry in enumerate(table):
            param = home.params[index]
            if entry == DENSE:
                self._send(worker, tag, param.clone(memory_format=torch.contiguous_format))
            elif entry > 0:
                rows = rows_by_part[index]
                self._send(worker, tag, rows)
                self._send(worker, tag, param[rows].contiguous())

    def _send_newest(self, task: Task, worker: int) -> None:
        home, number = task.home, task.home.record.number
        home.news(task.known[worker])
        task.known[worker] = home.version
        self._send(worker, messages.answer_tag(number), self._header(task, worker, Form.WHOLE))
        self._send(worker, messages.answer_body_tag(number), home.snapshot())

    def _header(self, task: Task, worker: int, form: Form) -> torch.Tensor:
        home = task.home
        return Header(
            *(Kind.STEP, worker, home.record.number, form, len(home.params), home.digest),
            version=home.version,
        ).tensor()

    def _answer(self, request: Request, answer: Any) -> None:
        worker, number = request.worker, request.header.optimizer
        body = messages.bytes_tensor(cloudpickle.dumps(answer))
        header = Header(Kind.ANSWER, worker, number, body_bytes=body.numel())
        self._send(worker, messages.answer_tag(number), header.tensor())
        self._send(worker, messages.answer_body_tag(number), body)

    def _send(self, worker: int, tag: int, tensor: torch.Tensor) -> None:
        """The engine keeps the tensor. If the worker has gone, its receiver says so."""
        if tensor.numel():
            self._team.engine.send(tensor.view(-1).view(torch.uint8), worker, tag)


def _text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
