"""How a worker waits for a server: says for whom it waits if that takes long."""

from __future__ import annotations

import logging
import time
from typing import Any

from hvdlite.asynchronous.server_link import ServerLink
from hvdlite.errors import HorovodInternalError
from hvdlite.world.config import Config
from hvdlite.world.teams.roles import Everyone

log = logging.getLogger("hvdlite")


class Waiting:
    """Waits for the operations of one optimizer's links."""

    def __init__(
        self,
        everyone: Everyone,
        config: Config,
        staleness: int | None,
        replicas: int | None = None,
    ) -> None:
        self._everyone = everyone
        disabled = config.stall_check_disable
        self._warning_s = 0.0 if disabled else float(config.stall_check_time_seconds)
        self._shutdown_s = 0.0 if disabled else float(config.stall_shutdown_time_seconds)
        self._rule = f"max_staleness={staleness}"
        if replicas is not None:
            self._rule = (
                f"sync_replicas={replicas}: each step needs the gradients of {replicas} workers, "
                "so a worker that makes no more steps must call hvd.join() before it waits for the "
                "others, as in hvd.barrier()"
            )

    def __call__(self, link: ServerLink, operation: Any, for_workers: bool) -> None:
        """Waits for an operation with a server. for_workers: it may wait for other workers.

        Raises:
            HorovodInternalError: It failed: the server, or another rank, has failed or left; or it
                has waited for as long as the knob `stall_shutdown_time_seconds` says.
        """
        if self._warning_s or self._shutdown_s:
            failure = self._wait_watching(link, operation, for_workers)
        else:
            failure = operation.wait()
        if failure is not None:
            raise HorovodInternalError(f"AsyncOptimizer: {failure}")

    def _wait_watching(self, link: ServerLink, operation: Any, for_workers: bool) -> str | None:
        begun = time.monotonic()
        warned = False
        while True:
            limits_s = [self._shutdown_s] if warned else [self._warning_s, self._shutdown_s]
            limit_s = min((limit for limit in limits_s if limit), default=0.0)
            left_s = max(0.0, limit_s - (time.monotonic() - begun)) if limit_s else -1.0
            try:
                failure: str | None = operation.wait(left_s)
                return failure
            except TimeoutError:
                passed_s = time.monotonic() - begun
            text = self._text(link, passed_s) if for_workers else self._no_answer(link, passed_s)
            if operation.poll():
                continue  # it has ended while the server was asked: it waits for nobody
            if self._shutdown_s and passed_s >= self._shutdown_s:
                self._everyone.team.engine.give_up(text)
                raise HorovodInternalError(text)
            log.warning("%s", text)
            warned = True

    def _no_answer(self, link: ServerLink, passed_s: float) -> str:
        own = self._everyone.name_of(self._everyone.team.rank)
        return (
            f"{own} has waited {passed_s:.0f} s for an answer of {link.name}, which gives it at "
            "once if it can: is it stopped, or in a long step of the optimizer?"
        )

    def _text(self, link: ServerLink, passed_s: float) -> str:
        found = link.look()
        own = self._everyone.name_of(self._everyone.team.rank)
        made, counted = found["made"], found["counted"]
        if found["given"]:
            late = [worker for worker in counted if worker not in found["given"]]
            what = f"their gradients of step {made[0]}"
        else:
            slowest = min((made[worker] for worker in counted), default=0)
            late = [worker for worker in counted if made[worker] == slowest]
            what = f"their step {slowest}"
        names = ", ".join(
            self._everyone.name_of(self._everyone.roles.workers[worker]) for worker in late[:8]
        )
        names += ", …" * (len(late) > 8)
        return (
            f"{own} has waited {passed_s:.0f} s for {link.name}, which waits for {what} from: "
            f"{names or 'nobody'} ({self._rule})"
        )
