"""Worlds without MPI: their ranks find each other through a Store of torch.distributed.

The Store is not trusted: other users may read it and write to it. So it holds records of fixed size
only, which are checked; nothing in them is unpickled, and no name in them decides anything. Rank 0
publishes the random name of a socket and a token; the others meet it there (`on_host`), which
only processes of this user on this host can do. So having met is what "on the same host" means
here. A rank that can't meet says so in the Store, and rank 0 tells all ranks the same.

Keys carry the launcher's restart count, the purpose, and how often this rank has come with this
Store, so that no record of an earlier world is taken for one of this.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hvdlite.errors import LaunchError
from hvdlite.world.bootstrap import on_host
from hvdlite.world.bootstrap.host_peers import HostPeers, tell_failure

log = logging.getLogger("hvdlite")

_MAGIC = b"hvdlite\0"
_VERSION = 1
_HEAD = "!8sHH"  # magic, version, kind
_HOST_BYTES = 64
_NUM_NAMED = 16

_LISTENS, _HAS_COME, _CANT_MEET, _FAILED_HOSTS, _FAILED_MISSING, _FAILED = range(1, 7)

_PLACE_BYTES = 16
_UNKNOWN_PLACE = bytes(_PLACE_BYTES)
PROC = "/proc"

# Kind, size of the world, socket's name, token, where it is (see `_own_place`).
_LISTENING = struct.Struct(f"{_HEAD}I{on_host.NAME_BYTES}s{on_host.TOKEN_BYTES}s{_PLACE_BYTES}s")
# Kind, rank, its host's name.
_REPORT = struct.Struct(f"{_HEAD}I{_HOST_BYTES}s")
# Kind, number of ranks that the text names, these ranks, the host's names of rank 0 and of these.
_VERDICT = struct.Struct(f"{_HEAD}I{_NUM_NAMED}I{_HOST_BYTES}s{_HOST_BYTES}s")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """A Store, and which of how many ranks this process is there.

    purpose: distinguishes bootstraps over one Store.
    launcher: what has started the ranks, for texts.
    """

    store: Any
    rank: int
    size: int
    timeout_s: float
    purpose: str = "world"


def meet(place: Place, warn_after_s: float) -> HostPeers:
    """All ranks of the place call it; blocks. Each gets the peers of all.

    warn_after_s: then a warning names the ranks that have not come; 0: never.

    Raises:
        LaunchError: They did not all come in time, or they can't meet as they are on several hosts;
            on every rank.
    """
    records = _Records(place)
    deadline = time.monotonic() + place.timeout_s
    records.put(f"rank {place.rank}", _report(_HAS_COME, place.rank))
    watch = _Watch(records, warn_after_s)
    if place.rank == 0:
        sockets, secret = _receive_all(records, watch, deadline), secrets.token_bytes(32)
    else:
        sockets, secret = {0: _go_to_rank_0(records, watch, deadline)}, b""
    peers = HostPeers(place.rank, range(place.size), sockets, b"", place.timeout_s)
    return peers.with_secret(peers.bcast(secret))


class _Records:
    """The records of one bootstrap in the Store."""

    def __init__(self, place: Place) -> None:
        self.place = place
        attempt = re.sub(r"\D", "", os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))[:9] or "0"
        base = f"hvdlite/{attempt}/{place.purpose}"
        times = self._ask(lambda: place.store.add(f"{base}/times {place.rank}", 1))
        self._prefix = f"{base}/{int(times)}/"

    def put(self, name: str, record: bytes) -> None:
        self._ask(lambda: self.place.store.set(self._prefix + name, record))

    def get(self, name: str, form: struct.Struct, kinds: Sequence[int]) -> tuple[Any, ...] | None:
        """The fields of a record behind its version; None if it is not there.

        Raises:
            LaunchError: It is not a record of one of these kinds.
        """
        if not self.has(name):
            return None
        record = self._ask(lambda: self.place.store.get(self._prefix + name))
        if len(record) != form.size:
            problem = f"{len(record)} bytes instead of {form.size}"
        else:
            magic, version, *fields = form.unpack(record)
            if magic == _MAGIC and version == _VERSION and fields[0] in kinds:
                return tuple(fields)
            problem = (
                f"version {version} instead of {_VERSION}: the ranks have different hvdlites"
                if magic == _MAGIC and version != _VERSION
                else "something else than hvdlite writes"
            )
        raise LaunchError(
            f"rank {self.place.rank}: the Store of torch.distributed has a bad record "
            f"{self._prefix + name!r}: {problem}; start the job with another MASTER_PORT, as "
            "another program writes to this Store"
        )

    def has(self, name: str) -> bool:
        return bool(self._ask(lambda: self.place.store.check([self._prefix + name])))

    def _ask(self, question: Callable[[], Result]) -> Result:
        try:
            return question()
        except (RuntimeError, ValueError) as error:  # of torch: DistError, and what std:: throws
            raise LaunchError(
                f"rank {self.place.rank}: the Store of torch.distributed failed: {error}"
            ) from error


class _Watch:
    """Warns once if ranks are late."""

    def __init__(self, records: _Records, warn_after_s: float) -> None:
        self._records = records
        self._due = time.monotonic() + warn_after_s if warn_after_s else float("inf")
        self._begun = time.monotonic()

    def missing(self) -> list[int]:
        place = self._records.place
        return [rank for rank in range(place.size) if not self._records.has(f"rank {rank}")]

    def look(self) -> None:
        if time.monotonic() > self._due:
            self._due = float("inf")
            log.warning(
                "rank %d waits for %s in init for %.0f s",
                self._records.place.rank,
                _ranks(self.missing()),
                time.monotonic() - self._begun,
            )


def _receive_all(records: _Records, watch: _Watch, deadline: float) -> dict[int, socket.socket]:
    """Rank 0: the sockets of all others."""
    size = records.place.size
    name, token = secrets.token_bytes(on_host.NAME_BYTES), secrets.token_bytes(on_host.TOKEN_BYTES)
    reception = on_host.Reception(on_host.listen(name), token, size, _rank)
    try:
        record = _LISTENING.pack(_MAGIC, _VERSION, _LISTENS, size, name, token, _own_place())
        records.put("bootstrap", record)
        pauses = iter(on_host.pauses())
        while missing := reception.missing():
            if time.monotonic() > deadline:
                raise _failure(records, _FAILED_MISSING, missing)
            reception.turn(next(pauses))
            _look_for_report(records)
            watch.look()
    except BaseException as error:
        text = str(error) or type(error).__name__
        if not isinstance(error, _Failed):
            with contextlib.suppress(LaunchError):
                records.put("verdict", _verdict(_FAILED, [], b""))
        for sock in reception.met.values():
            tell_failure(sock, text)
            sock.close()
        raise
    finally:
        reception.close()
    return reception.met


def _look_for_report(records: _Records) -> None:
    """Raises _Failed if a rank says that it can't meet this one."""
    fields = records.get("trouble", _REPORT, (_CANT_MEET,))
    if fields is not None:
        _, rank, host = fields
        raise _failure(records, _FAILED_HOSTS, [rank], host)


class _Failed(LaunchError):
    """Rank 0 has said it to all."""


def _failure(records: _Records, kind: int, ranks: Sequence[int], host: bytes = b"") -> _Failed:
    """Says it in the Store, for those that have not met rank 0."""
    record = _verdict(kind, ranks, host)
    records.put("verdict", record)
    return _Failed(_text_of(records.place, _VERDICT.unpack(record)[2:]))


def _verdict(kind: int, ranks: Sequence[int], host: bytes) -> bytes:
    named = [*ranks[:_NUM_NAMED], *[0] * _NUM_NAMED][:_NUM_NAMED]
    return _VERDICT.pack(_MAGIC, _VERSION, kind, len(ranks), *named, _own_host(), host)


def _text_of(place: Place, fields: Sequence[Any]) -> str:
    kind, num_ranks, *named = fields[: 2 + _NUM_NAMED]
    host_0, host = map(_shown, fields[-2:])
    ranks = named[: min(num_ranks, _NUM_NAMED)]
    if kind == _FAILED_MISSING:
        return _text_of_missing(place, ranks)
    if kind == _FAILED_HOSTS:
        return (
            f"rank {ranks[0] if ranks else '?'} on {host} can't meet rank 0 on {host_0}: the "
            f"{place.size} ranks are on several hosts (or in containers that share no network "
            "namespace, or of several users), and between them hvdlite needs MPI; start them "
            f"with `hvdrun -np {place.size} -H host1:N,host2:M python train.py` instead (N and M "
            "ranks on each)"
        )
    return "rank 0 failed while the ranks met; its own error says why"


def _text_of_missing(place: Place, ranks: Sequence[int]) -> str:
    return (
        f"{_ranks(ranks)} of {place.size} did not come to init within {place.timeout_s:g} s; "
        "either they failed, or they do not call it"
    )


def _go_to_rank_0(records: _Records, watch: _Watch, deadline: float) -> socket.socket:
    """The socket to rank 0."""
    place = records.place
    reported = gone = False
    for pause_s in on_host.pauses():
        verdict = _read_verdict(records)
        if verdict is not None:
            raise LaunchError(verdict)
        if gone:
            raise LaunchError("rank 0 has ended, or given up, before all ranks had come to init")
        found = None if reported else records.get("bootstrap", _LISTENING, (_LISTENS,))
        if found is not None:
            _, size, name, token, where = found
            if size != place.size:
                raise LaunchError(
                    f"rank {place.rank} is one of {place.size} ranks, but rank 0 one of {size}; "
                    "set the same WORLD_SIZE for all"
                )
            try:
                return on_host.call(name, token, place.rank, place.size, deadline)
            except TimeoutError:
                pass
            except (on_host.Refused, on_host.UnauthenticatedPeer) as error:
                if isinstance(error, on_host.Refused) and where == _own_place() != _UNKNOWN_PLACE:
                    gone = True  # it has ended, or given up: then it has said why
                else:
                    records.put("trouble", _report(_CANT_MEET, place.rank))
                reported = True
            except OSError as error:
                # Rank 0 hangs up after it has written why it gives up.
                verdict = _read_verdict(records)
                raise LaunchError(verdict or f"rank {place.rank} meets rank 0: {error}") from error
        if time.monotonic() > deadline:
            raise LaunchError(_text_of_missing(place, watch.missing() or [0]))
        watch.look()
        time.sleep(pause_s)
    raise AssertionError


def _read_verdict(records: _Records) -> str | None:
    fields = records.get("verdict", _VERDICT, range(_FAILED_HOSTS, _FAILED + 1))
    return None if fields is None else _text_of(records.place, fields)


def _report(kind: int, rank: int) -> bytes:
    return _REPORT.pack(_MAGIC, _VERSION, kind, rank, _own_host())


def _own_place() -> bytes:
    """The same in all processes that see the same abstract sockets; _UNKNOWN_PLACE without /proc.
    It only chooses between texts: what makes ranks one host is that they have met."""
    try:
        with open(f"{PROC}/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        status = os.stat(f"{PROC}/thread-self/ns/net")
    except OSError:
        return _UNKNOWN_PLACE
    text = b"%s %d %d" % (boot, status.st_dev, status.st_ino)
    return hashlib.sha256(text).digest()[:_PLACE_BYTES]


def _own_host() -> bytes:
    return os.fsencode(socket.gethostname())[:_HOST_BYTES]


def _shown(host: bytes) -> str:
    """A host's name from the Store, fit to be printed."""
    return re.sub(r"[^A-Za-z0-9._-]", "?", host.rstrip(b"\0").decode("ascii", "replace")) or "?"


def _rank(number: int) -> str:
    return f"rank {number}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_NUM_NAMED])) + ", ..." * (len(ranks) > _NUM_NAMED)
    return f"ranks {shown}"
