"""The role `ssh`: MPI calls it in ssh's place. It gives hvdrun the ends of the connection, and
becomes ssh or the scheduler's program that reaches the host. Over there it runs `host_agent`."""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from hvdrun.agent.frames import HEADER, HOST, frame, send, write_all
from hvdrun.agent.peers import Stranger, connect
from hvdrun.machine.environment import (
    HOSTS,
    LINK,
    NODES,
    REACH,
    SSH,
    unpack,
    without_step_variables,
)
from hvdrun.machine.remote_words import for_any_shell, hex_of

SSH_TAKES_VALUE = frozenset("BbcDEeFIiJLlmOopQRSWw")


def main(arguments: list[str]) -> NoReturn:
    """Called by MPI as ssh, with `[OPTION…] HOST COMMAND…`. Becomes ssh or srun, gives hvdrun its
    ends, and runs the host agent as the remote command."""
    own, name_for_mpi, words = split_ssh(arguments)
    host, options = destination(name_for_mpi, os.environ)
    command = " ".join(words)
    remote = [os.environ.get("SHELL") or "/bin/sh", "-c", command]
    secret = os.environ.get(LINK, "")
    variables = dict(os.environ)
    if secret:
        sock = _hvdrun(secret, host)
        reader, writer = os.pipe()
        send(sock, frame(HOST, payload=host.encode()), [reader])
        # MPI has got no others than its own.
        variables = {**_variables(sock, host), **os.environ}
        os.dup2(sock.fileno(), 0)
        os.dup2(sock.fileno(), 1)
        os.dup2(writer, 2)
        words_for_agent = [shell_of_mpi(), hex_of(command)]
        remote = [sys.executable, "-I", "-S", sys.argv[0], "host", *words_for_agent]
        command = for_any_shell(remote)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    reach = shlex.split(os.environ.get(REACH, ""))
    if reach:
        words = [word.replace("{host}", host) for word in reach]
        environment = without_step_variables(variables)
        if NODES in os.environ:
            environment[NODES] = os.environ[NODES]
        _become([*words, *remote], environment)
    ssh = ["ssh", *options, *own, host, command]
    _become(ssh, variables, " (Debian: apt-get install openssh-client)")


def _hvdrun(secret: str, host: str) -> socket.socket:
    """A connection to hvdrun. Ends this process if there is none: nothing would end the ranks."""
    try:
        sock = connect(secret)
        problem = "hvdrun has ended"
    except Stranger as stranger:
        sock, problem = None, str(stranger)
    if sock is None:
        write_all(2, f"hvdrun: no connection to {host} was made: {problem}\n".encode())
        os._exit(1)
    return sock


def _variables(sock: socket.socket, host: str) -> dict[str, str]:
    """hvdrun's own, which it answers with. Reads nothing more: the rest is for ssh."""
    data = b""
    while len(data) < (length := _length(data)):
        more = sock.recv(length - len(data))
        if not more:
            write_all(2, f"hvdrun: no connection to {host} was made: hvdrun has ended\n".encode())
            os._exit(1)
        data += more
    return unpack(data[HEADER.size :])


def _length(begun: bytes) -> int:
    """Of a frame that begins like this, as far as that is known."""
    if len(begun) < HEADER.size:
        return HEADER.size
    return HEADER.size + int(HEADER.unpack_from(begun)[2])


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


def _become(argv: list[str], environment: dict[str, str], remedy: str = "") -> NoReturn:
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        write_all(2, f"{argv[0]}: {error.strerror}{remedy}\n".encode())
    os._exit(127)
