"""The roles `ssh` and `reach`: programs in ssh's place. MPI calls the one to start its daemons. It
tells hvdrun, which starts the daemon over its own connection to that host, and waits for the end.

The other one runs a program on another host where each host has started hvdrun itself."""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hvdrun.agent.frames import BYE, HOST, SSH_FAILED, frame, receive, send, unpack, write_all
from hvdrun.agent.peers import Stranger, connect
from hvdrun.machine.environment import HOSTS, LINK, NODES, REACH, SSH, for_connections
from hvdrun.machine.remote_words import for_any_shell

SSH_TAKES_VALUE = frozenset("BbcDEeFIiJLlmOopQRSWw")
# What MPIs give to ssh by themselves, and preflight's connections have as well.
OF_MPI: tuple[list[str], ...] = ([], ["-x"])


def main(arguments: list[str]) -> NoReturn:
    """Called by MPI as ssh, with `[OPTION…] HOST COMMAND…`. Becomes ssh if there is no hvdrun."""
    own, name_for_mpi, words = split_ssh(arguments)
    host, options = destination(name_for_mpi, os.environ)
    command = " ".join(words)
    secret = os.environ.get(LINK, "")
    remote = [os.environ.get("SHELL") or "/bin/sh", "-c", command]
    if secret:
        remote = [sys.executable, "-I", "-S", sys.argv[0], "host"]
    if reach := shlex.split(os.environ.get(REACH, "")):
        argv = [*(word.replace("{host}", host) for word in reach), *remote]
    else:
        argv = ["ssh", *options, *own, host, for_any_shell(remote) if secret else command]
    if secret:
        _ask(secret, (host, "" if own in OF_MPI else "own", shell_of_mpi(), command, *argv))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, for_connections(os.environ))
    except OSError as error:
        write_all(2, f"{argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def reach(arguments: list[str]) -> NoReturn:
    """Called with `HOST COMMAND…`: runs the command with this process's standard descriptors."""
    _ask(os.environ.get(NODES, ""), arguments, (0, 1, 2))


def _ask(secret: str, wish: Sequence[str], fds: Sequence[int] = ()) -> NoReturn:
    """Asks hvdrun to run something on a host, and ends with its exit code."""
    host = wish[0]
    try:
        sock = connect(secret)
        problem = "hvdrun has ended"
    except Stranger as stranger:
        sock, problem = None, str(stranger)
    if sock is None:
        _fail(f"no connection to {host} was made: {problem}")
    payload = "\0".join((secret, *wish)).encode(errors="surrogateescape")
    buffer = bytearray()
    try:
        send(sock, frame(HOST, payload=payload), fds)
        while data := receive(sock)[0]:
            buffer += data
            for kind, _, answer in unpack(buffer):
                if kind == BYE:
                    code, _, why = answer.partition(b" ")
                    if why:
                        _fail(why.decode(errors="replace"))
                    os._exit(int(code))
    except OSError:
        pass
    _fail(f"hvdrun has ended while a program ran on {host}")


def _fail(why: str) -> NoReturn:
    try:
        write_all(2, f"hvdrun: {why}\n".encode())
    finally:
        os._exit(SSH_FAILED)


def split_ssh(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """Splits MPI's arguments for ssh: options, which the user or the cluster's administrator may
    have set for MPI (-x, -o NAME=VALUE …), host, and command."""
    at = 0
    while arguments[at].startswith("-"):
        # The value of an option may be the next word.
        at += 2 if arguments[at][1:] in SSH_TAKES_VALUE else 1
    return arguments[:at], arguments[at], arguments[at + 1 :]


def destination(name: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The host that MPI calls `name`, and hvdrun's options for ssh to it."""
    host, options = name, shlex.split(environ.get(SSH, ""))
    known = environ.get(HOSTS, "")
    lines = known.split(",")
    if known.startswith("/"):
        with open(known) as file:
            lines = [line.partition("#")[2] for line in file]
    for about in lines:
        words = about.split()
        if words[:1] == [name]:
            # ssh uses the first port that it gets.
            host, options = words[-1], [*words[1:-1], *options]
            break
    return host, options


def shell_of_mpi() -> str:
    """The shell for which MPI writes its daemon's command. Open MPI goes by the user's login shell
    on hvdrun's machine, and writes for csh or for sh."""
    try:
        shell = pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:  # a number without an account, or the file can't be opened
        shell = ""
    return "csh" if os.path.basename(shell) in ("csh", "tcsh") else "sh"
