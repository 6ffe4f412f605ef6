"""A server: holds parts of parameters, applies gradients to them and hands them out.

One thread does everything, in the order in which requests come (`receiving`). It never waits for a
worker: what it can't answer yet, it answers when another worker's push makes that possible.
"""

from __future__ import annotations

import collections
import logging
import pickle
import queue
import time
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from hvdlite.asynchronous import messages
from hvdlite.asynchronous.clocks import Clocks, Rounds
from hvdlite.asynchronous.messages import DENSE, Form, Header, Kind
from hvdlite.asynchronous.receiving import Failure, Lost, Receiver, Request
from hvdlite.asynchronous.served import Push, Record, Served, mean
from hvdlite.asynchronous.turns import Turns
from hvdlite.errors import HorovodInternalError
from hvdlite.world.teams.roles import Everyone

log = logging.getLogger("hvdlite")

# After a failure, for the receivers to learn of it.
_FAILED_LIMIT_S = 5.0


@dataclass(frozen=True)
class _Decision:
    """workers: those whose next gradients here make a step together; or whose are dropped."""

    workers: tuple[int, ...]
    is_drop: bool


class _Job:
    """One optimizer: its parameters here, and who has made which steps."""

    def __init__(self, record: Record, local_workers: list[int], is_first: bool) -> None:
        self.record = record
        self.served = Served(record, local_workers)
        self.clocks = Clocks(record.num_workers)
        self.rounds = (
            None
            if record.replicas is None
            else Rounds(record.num_workers, min(record.replicas, record.num_workers))
        )
        # Those of the first server that this one has not carried out, see `_follow`.
        self.decisions: collections.deque[_Decision] = collections.deque()
        # Not applied yet, by worker.
        self.pushes: dict[int, Push] = {}
        # Whether the first server decides whose gradients make a step.
        self.follows = (
            self.rounds is not None and self.rounds.quorum < record.num_workers and not is_first
        )
        # By worker: what the parameters must contain that it waits for.
        self.waiting: dict[int, int] = {}
        # By worker: the version that it got last.
        self.known = [0] * record.num_workers
        # Came from workers that count as away until all have joined.
        self.early: list[Push] = []
        self.users = set(range(record.num_workers))


class Server:
    """Serves until all workers have left."""

    def __init__(self, everyone: Everyone) -> None:
        self._everyone = everyone
        self._team = everyone.team
        self._name = everyone.name_of(self._team.rank)
        self._workers = everyone.roles.workers
        own_host = everyone.host_of(self._team.rank)
        self._local = [
            number
            for number, rank in enumerate(self._workers)
            if everyone.host_of(rank) == own_host
        ]
        self._jobs: dict[int, _Job] = {}
        self._served: dict[int, Served] = {}
        self._gone: set[int] = set()
        self._inbox: queue.SimpleQueue[Request | Failure] = queue.SimpleQueue()

    def run(self) -> None:
        """Returns when all workers have left in good order.

        Raises:
            HorovodInternalError: A worker has died. Or something failed here: then every worker's
                next call fails, too, with a text that names this server and the cause.
        """
        first, *others = self._everyone.roles.servers
        is_first = self._team.rank == first
        sources = list(enumerate(self._workers)) + ([] if is_first else [(0, first)])
        turns = Turns(len(self._workers))
        receivers = [
            Receiver(self._team, rank, number, self._served, self._inbox, turns)
            for number, rank in sources
        ]
        failed = False
        try:
            while len(self._gone) < len(self._workers):
                request = self._inbox.get()
                if isinstance(request, Failure):
                    sender = self._everyone.name_of(request.source)
                    raise Lost(
                        f"receiving from {sender}: {_text_of(request.error)}"
                    ) from request.error
                self._handle(request)
            end = Header(Kind.END, 0).tensor()
            told = [
                self._team.engine.send(end, other, messages.REQUEST_TAG)
                for other in (others if is_first else ())
            ]
            for operation in told:
                operation.wait()  # else this server's departure could overtake it
        except Exception as error:
            text = f"{self._name} failed: {_text_of(error)}"
            self._team.engine.give_up(text)
            failed = True
            if isinstance(error, HorovodInternalError):
                raise
            raise HorovodInternalError(text) from error
        finally:
            if len(self._gone) < len(self._workers):
                # When they have ended, all ranks of this host hear of the failure before they hear
                # that this one has left.
                deadline = time.monotonic() + _FAILED_LIMIT_S
                for receiver in receivers:
                    receiver.thread.join(max(0.0, deadline - time.monotonic()) if failed else 0.0)
                self._team.close()  # so that the rest ends
            for receiver in receivers:
                receiver.thread.join()
            for served in self._served.values():
                served.close()

    def _handle(self, request: Request) -> None:
        kind, worker, number = request.header.kind, request.worker, request.header.optimizer
        if kind is Kind.BYE:
            self._gone.add(worker)
            for job in self._jobs.values():
                self._let_go(job, worker)
            return
        if kind is Kind.END:
            return
        if kind is Kind.SETUP:
            self._answer(request, self._set_up(request))
            return
        found = self._jobs.get(number)
        if found is None:
            if kind is Kind.DECIDED:
                return  # all workers have released it
            raise messages.BadMessage(f"{kind.name} of worker {worker} for no optimizer {number}")
        job = found
        if kind is Kind.PUSH:
            self._on_push(job, request.body)
        elif kind is Kind.PULL:
            self._send_newest(job, worker)
        elif kind is Kind.OPTIONS:
            job.served.set_options(worker, request.body)
        elif kind is Kind.DECIDED:
            job.decisions.append(request.body)
            self._go_on(job)
        elif kind is Kind.JOIN:
            if job.clocks.join(worker):
                self._resume(job)
            self._go_on(job)
        elif kind is Kind.RELEASE:
            self._let_go(job, worker)
            job.users.discard(worker)
            if not job.users:
                del self._jobs[number], self._served[number]
                job.served.close()
        else:
            self._answer(request, self._reply(job, request))

    def _reply(self, job: _Job, request: Request) -> Any:
        kind = request.header.kind
        if kind is Kind.ATTACH:
            offer = job.served.offer
            return offer if offer is not None and request.worker in offer.workers else None
        if kind is Kind.STATE:
            return job.served.state()
        if kind is Kind.LOOK:
            dropped = 0 if job.rounds is None else job.rounds.dropped
            return {
                "made": list(job.clocks.made),
                "counted": job.clocks.counted(),
                "given": [] if job.rounds is None else list(job.rounds.given),
                "dropped": dropped,
                "applied": job.served.version - 1,
            }
        if kind is Kind.LOAD:
            return self._load(job, request)
        raise messages.BadMessage(f"{kind.name} from worker {request.worker}")

    def _set_up(self, request: Request) -> str | None:
        """What went wrong, in words."""
        record: Record = request.body
        try:
            job = _Job(record, self._local, self._team.rank == record.servers[0])
        except Exception as error:
            return f"{self._name}: {_text_of(error)}"
        assert request.values is not None
        job.served.memory.copy_(request.values)
        for worker in self._gone:
            job.clocks.leave(worker)
        self._jobs[record.number] = job
        self._served[record.number] = job.served
        return None

    def _load(self, job: _Job, request: Request) -> str | None:
        """What went wrong, in words."""
        try:
            state = pickle.loads(request.body)
        except Exception as error:
            return f"{self._name}: {_text_of(error)}"
        assert request.values is not None
        job.served.memory.copy_(request.values)
        job.served.overwrite(state)
        return None

    def _on_push(self, job: _Job, push: Push) -> None:
        if push.worker in job.clocks.away:
            job.early.append(push)
            return
        job.waiting[push.worker] = push.needs
        if job.rounds is None:
            job.served.apply(push)
            job.clocks.step(push.worker)
        elif job.follows or job.rounds.give(push.worker, push.clock):
            job.pushes[push.worker] = push
        else:
            self._tell_others(job, _Decision((push.worker,), True))
        self._go_on(job)

    def _go_on(self, job: _Job) -> None:
        """Does what has become possible: ends rounds, and answers who has waited for it."""
        rounds = job.rounds
        if rounds is not None and job.follows:
            self._follow(job, rounds)
            return
        if rounds is not None and rounds.is_complete(job.clocks.counted()):
            workers = tuple(rounds.finish())
            self._tell_others(job, _Decision(workers, False))
            self._end_round(job, rounds, workers)
        for worker, needs in list(job.waiting.items()):
            if job.clocks.holds(needs) if rounds is None else rounds.round >= needs:
                self._send_awaited(job, worker)

    def _end_round(self, job: _Job, rounds: Rounds, workers: tuple[int, ...]) -> None:
        pushes = [job.pushes.pop(worker) for worker in workers]
        job.served.apply(mean(pushes, job.served.layout))
        job.clocks.made = [rounds.round] * job.record.num_workers

    def _follow(self, job: _Job, rounds: Rounds) -> None:
        """Carries out the first server's decisions, in their order, once the gradients are here:
        so each step has the gradients of the same workers on all servers. The first server has got
        them, so they come. A worker has one push on its way at most; each is in one decision."""
        while job.decisions:
            decision = job.decisions[0]
            if not all(worker in job.pushes for worker in decision.workers):
                return
            job.decisions.popleft()
            if decision.is_drop:
                del job.pushes[decision.workers[0]]
                rounds.dropped += 1
            else:
                rounds.round += 1
                self._end_round(job, rounds, decision.workers)
            for worker in decision.workers:
                self._send_awaited(job, worker)

    def _tell_others(self, job: _Job, decision: _Decision) -> None:
        assert job.rounds is not None
        if job.rounds.quorum == job.record.num_workers:
            return  # every server waits for all workers
        body = messages.bytes_tensor(cloudpickle.dumps(decision))
        header = Header(Kind.DECIDED, 0, job.record.number, body_bytes=body.numel()).tensor()
        for server in job.record.servers[1:]:
            self._send(server, messages.REQUEST_TAG, header)
            self._send(server, messages.BODY_TAG, body)

    def _let_go(self, job: _Job, worker: int) -> None:
        """The others do not wait for this worker any more."""
        job.waiting.pop(worker, None)
        if job.clocks.leave(worker):
            self._resume(job)
        self._go_on(job)

    def _resume(self, job: _Job) -> None:
        """All have joined, and begin again together."""
        if job.rounds is not None:
            job.rounds.round = max([job.rounds.round, *job.clocks.made])
        early, job.early = job.early, []
        for push in early:
            self._on_push(job, push)

    def _send_awaited(self, job: _Job, worker: int) -> None:
        """The parameters that a push has asked for; nothing to a worker that has left."""
        if job.waiting.pop(worker, None) is not None:
            self._send_step(job, worker)

    def _send_step(self, job: _Job, worker: int) -> None:
        """What has changed since the worker's last parameters."""
        served, number, rank = job.served, job.record.number, self._workers[worker]
        table, rows_by_part = served.news(job.known[worker])
        job.known[worker] = served.version
        is_whole = all(entry == DENSE for entry in table)
        form = Form.PARTS
        if is_whole:
            form = self._form_for(job, worker)
        clock = job.clocks.made[worker] if job.rounds is None else job.rounds.round
        self._send(rank, messages.step_tag(number), self._header(job, worker, form, clock).tensor())
        if form is Form.WHOLE:
            self._send(rank, messages.whole_tag(number), self._stable(job))
        elif form is Form.PARTS:
            tag = messages.parts_tag(number)
            self._send(rank, tag, torch.tensor(table, dtype=torch.int64))
            for index, entry in enumerate(table):
                param = served.params[index]
                if entry == DENSE:
                    self._send(rank, tag, param.clone())
                elif entry > 0:
                    rows = rows_by_part[index]
                    self._send(rank, tag, rows)
                    self._send(rank, tag, param[rows])

    def _form_for(self, job: _Job, worker: int) -> Form:
        """How all parameters get to a worker. Those of a round that not all workers wait for are
        sent as copies: they must not be read where the next round is applied meanwhile."""
        offer, rounds = job.served.offer, job.rounds
        if offer is None or worker not in offer.workers:
            return Form.WHOLE
        if rounds is not None and rounds.quorum < job.record.num_workers:
            return Form.PARTS
        return Form.SHARED

    def _send_newest(self, job: _Job, worker: int) -> None:
        number, rank = job.record.number, self._workers[worker]
        job.known[worker] = job.served.version
        header = self._header(job, worker, Form.WHOLE, job.clocks.made[worker])
        self._send(rank, messages.answer_tag(number), header.tensor())
        self._send(rank, messages.answer_body_tag(number), job.served.memory.clone())

    def _stable(self, job: _Job) -> torch.Tensor:
        """The parameters, to be sent while pushes may go on. Of a round that not all workers wait
        for, a copy: a worker must not get half of the next one. Without rounds a push may be
        contained in part."""
        rounds = job.rounds
        if rounds is not None and rounds.quorum < job.record.num_workers:
            return job.served.memory.clone()
        return job.served.memory

    def _header(self, job: _Job, worker: int, form: Form, clock: int) -> Header:
        served = job.served
        return Header(
            *(Kind.STEP, worker, job.record.number, form, len(served.params), served.digest),
            clock=clock,
            version=served.version,
        )

    def _answer(self, request: Request, answer: Any) -> None:
        header, rank = request.header, self._workers[request.worker]
        body = messages.bytes_tensor(cloudpickle.dumps(answer))
        reply = Header(
            Kind.ANSWER, request.worker, header.optimizer, body_bytes=body.numel()
        ).tensor()
        self._send(rank, messages.answer_tag(header.optimizer), reply)
        self._send(rank, messages.answer_body_tag(header.optimizer), body)

    def _send(self, rank: int, tag: int, tensor: torch.Tensor) -> None:
        """The engine keeps the tensor. If the worker has gone, its receiver says so."""
        if tensor.numel():
            self._team.engine.send(tensor.view(-1).view(torch.uint8), rank, tag)


def serve(everyone: Everyone) -> None:
    """What a server does in `hvdlite.init`."""
    log.info("%s serves", everyone.name_of(everyone.team.rank))
    Server(everyone).run()


def _text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
