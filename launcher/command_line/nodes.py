"""Jobs that are started by the same command on each of their hosts (see `rendezvous`): which part
this host plays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import hvdrun
from hvdrun.errors import LaunchError, UsageError
from hvdrun.machine.environment import NODES
from hvdrun.machine.processes import hide_memory
from hvdrun.machine.resources import gpu_count, physical_cores
from hvdrun.machine.socket_users import is_ambiguous
from hvdrun.output.writer import Writer, write_all
from hvdrun.plan.facts import hosts_file, local_names
from hvdrun.plan.request import Request
from hvdrun.plan.schedulers.scheduler import allocation
from hvdrun.rendezvous.place import Place, by_options, by_variables, shares
from hvdrun.reports import lacking
from hvdrun.running.sources import NodeSignals

if TYPE_CHECKING:
    from hvdrun.rendezvous.messages import Hello

# By their names in Python.
OPTIONS = ("rendezvous", "node_rank", "nodes", "rendezvous_secret_file")
_SERVERS = "HVDLITE_SERVERS"
_LAST_WORDS_S = 2.0  # for a reader that is slow
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Job(Protocol):
    def __call__(
        self, request: Request, on_line: Callable[[str], None], node_signals: NodeSignals, /
    ) -> int:
        """Runs or checks the job from node 0. The exit code."""


def check_options(given: Mapping[str, Any]) -> None:
    """`given`: the values of the options. Raises UsageError."""
    for option in ("hosts", "hostfile"):
        if given[option] and given["rendezvous"]:
            raise UsageError(
                f"--{option} and --rendezvous are two ways to start: with --{option}, hvdrun runs"
                " on one host and reaches the others over ssh; with --rendezvous, it runs on each"
                " of them. Leave one of them out"
            )
        for other in OPTIONS:
            if given[option] and given[other] is not None:
                raise UsageError(
                    f"--{other.replace('_', '-')} is for hosts that each start hvdrun, and with"
                    f" --{option}, hvdrun runs on one host and reaches the others over ssh. Leave"
                    " one of them out"
                )


def place_of(
    request: Request, given: Mapping[str, Any], environ: Mapping[str, str]
) -> Place | None:
    """None if hvdrun starts the job from here alone. What counts, in this order: named hosts, the
    options, a scheduler's allocation, variables."""
    if request.hosts:
        return None
    place = by_options(given["rendezvous"], given["node_rank"], given["nodes"], environ)
    if place is None and request.allocation is None:
        place = by_variables(environ)
    return place if place is not None and place.nodes > 1 else None


def run(request: Request, place: Place, secret_file: str | None, job: Job) -> int:
    """This host's part of the job. The exit code."""
    from hvdrun.rendezvous import secret as secrets  # a job of one host needs none

    request = _with_servers(request, place)
    secret = secrets.take(os.environ, secret_file)
    # Where a user's number is not its own, the job's processes know each other by that they can
    # read each other (see machine.socket_users).
    if secret and not is_ambiguous(os.geteuid()):
        hide_memory()
    secrets.check_needed(place.host, secret)
    key = secrets.key_of(secret)
    own = _greeting(request, place)
    if place.node_rank:
        from hvdrun.rendezvous.other_node import OtherNode  # it loads cryptography

        screen = _Screen()
        try:
            return OtherNode(place, key, own, not secret).run(request.start_timeout_s, screen.say)
        finally:
            screen.drain()
    return _run_first(request, place, key, own, not secret, job)


def _run_first(
    request: Request, place: Place, key: bytes, own: Hello, only_this_user: bool, job: Job
) -> int:
    from hvdrun.rendezvous.first_node import FirstNode  # it loads cryptography

    node_signals = NodeSignals()
    first = FirstNode(place, key, own, only_this_user, node_signals.add)
    code = 1
    try:
        first.start(request.host_timeout_s)
        hellos = first.wait_for_nodes(request.start_timeout_s, _print)
        names = _names(place, [hello.hostname for hello in hellos])
        first.names = {name: number for number, name in enumerate(names) if number}
        slots = [hello.slots for hello in (own, *hellos)]
        # For preflight's commands; ranks do not get it.
        os.environ[NODES] = first.secret_here
        request = _with_hosts(request, place, names, slots, first.secret_here)
        code = job(request, first.say, node_signals)
        return code
    except LaunchError as error:
        first.say(f"hvdrun: {error}")
        code = error.code
        raise
    except (OSError, MemoryError, RuntimeError) as error:  # see cli.main
        lack = lacking.of(error)
        code = code if lack is None else lack.code
        first.say(f"hvdrun: node 0 has failed: {error if lack is None else lack}")
        raise
    except KeyboardInterrupt as interrupt:  # with the signal's number, see __main__.interrupt
        code = 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
        first.say("hvdrun: ended by a signal before a rank had been started")
        raise
    finally:
        # The end takes a moment; one that is cut short would leave the other nodes without a
        # result.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        first.end(code)


def as_if_all_were_here(request: Request, place: Place) -> Request:
    """For --dry-run, which waits for nobody: other nodes have made-up names."""
    names = _names(place, [f"node{number}" for number in range(1, place.nodes)])
    own = gpu_count(os.environ.get("CUDA_VISIBLE_DEVICES")) or physical_cores()
    return _with_hosts(_with_servers(request, place), place, names, [own] * place.nodes, "-")


def _with_hosts(
    request: Request, place: Place, names: Sequence[str], slots: Sequence[int], secret_here: str
) -> Request:
    agent = os.path.join(os.path.dirname(os.path.abspath(hvdrun.__file__)), "agent", "agent.py")
    counts = shares(place, request.num_proc, slots)
    return replace(
        request, allocation=allocation(names, counts, sys.executable, agent, secret_here)
    )


def _with_servers(request: Request, place: Place) -> Request:
    """The parameter servers of TF_CONFIG are the job's servers."""
    if not place.servers:
        return request
    given = request.variable(_SERVERS, os.environ)
    if given is not None and given != str(place.servers):
        raise UsageError(
            f"--servers {given}: {place.source} names {place.servers} hosts as parameter servers"
            " (ps); leave --servers out, or make the numbers equal"
        )
    return replace(request, settings={**request.settings, _SERVERS: str(place.servers)})


def _greeting(request: Request, place: Place) -> Hello:
    from hvdrun.rendezvous.messages import Hello

    return Hello(
        version=version(),
        node_rank=place.node_rank,
        nodes=place.nodes,
        hostname=socket.gethostname(),
        num_proc=request.num_proc,
        gpus=gpu_count(request.variable("CUDA_VISIBLE_DEVICES", os.environ)),
        cores=physical_cores(),
    )


def version() -> str:
    from importlib import metadata

    return metadata.version("hvdlite")


def _names(place: Place, hostnames: Sequence[str]) -> list[str]:
    """A name for each node. This one has the name by which the others have reached it, which MPI
    uses as well; another one has its own, if no other node has the same."""
    taken = local_names("", hosts_file()) | {place.host.lower()}
    names = [place.host]
    for number, hostname in enumerate(hostnames, 1):
        name = hostname
        if hostname.lower() in taken or not _HOST_NAME.fullmatch(hostname):
            name = f"node{number}" if f"node{number}" not in taken else f"hvdrun-node{number}"
        taken |= {name.lower()}
        names.append(name)
    return names


class _Screen:
    """Of a node whose loop must go on if nobody reads what it says, now or ever."""

    def __init__(self) -> None:
        self._writer = Writer()
        self._sink = partial(write_all, 2)

    def say(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._writer.write(self._sink, f"{text}\n".encode(errors="replace"))

    def drain(self) -> None:
        self._writer.drain(time.monotonic() + _LAST_WORDS_S)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
