"""The role `rank`: the program that MPI starts. It forks the keeper, and ends as the shim with the
rank's exit code. `agent` has the picture."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import NoReturn

from hvdrun.agent import signals
from hvdrun.agent.frames import EXIT, frame, send, write_all
from hvdrun.agent.peers import Stranger, connect
from hvdrun.agent.rank.keeper import Keeper
from hvdrun.agent.rank.spawn import become, bind, by_launcher
from hvdrun.machine.environment import LINK, NODES, PATIENCE
from hvdrun.machine.limits import LACKING
from hvdrun.machine.remote_words import unescape

UNREACHABLE = (
    "hvdrun: rank {rank} was not started: neither hvdrun nor its agent runs on {host}, so nothing"
    " would end the rank; hvdrun was killed, or MPI started its daemon without hvdrun's agent (see"
    " --mpi-args)\n"
)


def main(arguments: list[str], role: str) -> NoReturn:
    """role: see `spawn.bind`."""
    command = unescape(arguments)
    environment = dict(os.environ)
    rank = int(by_launcher(environment).get("RANK", "0"))
    secret, patience_s = environment.pop(LINK, ""), environment.pop(PATIENCE, "")
    environment.pop(NODES, None)  # a rank has no business on other hosts
    if not secret:
        cpus = bind(environment, rank, role)
        try:
            become(command, environment, cpus)
        except OSError as error:
            write_all(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    try:
        sock = _supervisor(secret, float(patience_s or 0))
    except (Stranger, OSError) as problem:
        write_all(2, f"hvdrun: rank {rank} was not started: {problem}\n".encode())
        os._exit(1)
    if sock is None:
        write_all(2, UNREACHABLE.format(rank=rank, host=os.uname().nodename).encode())
        os._exit(1)
    for number in signals.FOR_THE_JOB:  # of MPI's signals to the shim, only KILL counts
        signal.signal(number, signal.SIG_IGN)
    daemon = os.getppid()
    try:
        reader, writer = os.pipe()
        pid = os.fork()
    except OSError as error:
        _lacks(sock, rank, error)
    if pid == 0:
        try:
            os.close(reader)
            Keeper(sock, writer, rank, daemon).keep(command, environment, role)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in LACKING:
                _lacks(sock, rank, error)
            text = f"the keeper of rank {rank} has failed: {type(error).__name__}: {error}"
            write_all(2, f"hvdrun: {text}\n".encode(errors="replace"))
        finally:
            os._exit(1)
    sock.close()
    os.close(writer)
    os._exit((os.read(reader, 1) or b"\1")[0])


def _lacks(sock: socket.socket, rank: int, error: OSError) -> NoReturn:
    """Tells the supervisor why the rank was not started."""
    how = f"lacks {error.errno} {time.monotonic_ns()}".encode()
    with contextlib.suppress(OSError):
        send(sock, frame(EXIT, rank, how))
    os._exit(1)


def _supervisor(secret: str, patience_s: float) -> socket.socket | None:
    """Waits for the supervisor: srun starts a rank at the same time as its host's agent."""
    give_up_at = time.monotonic() + patience_s
    while (sock := connect(secret)) is None and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return sock
