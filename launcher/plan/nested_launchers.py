"""Refuses two launchers of which one starts the other: each would start a whole set of ranks."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from hvdrun.errors import UsageError
from hvdrun.machine.environment import KEEPER, is_in_step
from hvdrun.plan.python_command import MODULE, SCRIPT, what_runs

OVERRIDE = "HVDLITE_NESTED"
# Programs and Python modules that start ranks.
LAUNCHERS = frozenset(
    (
        *("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed"),
        *("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun"),
        *("hvdrun", "horovodrun", "accelerate.commands.launch"),
    )
)
# Programs that start another one: those of their options whose value is the next word, and how many
# words of their own stand before the other program.
_NONE: frozenset[str] = frozenset()
WRAPPERS = {
    **dict.fromkeys(("exec", "nohup", "setsid", "time"), (_NONE, 0)),
    "env": (frozenset(("-u", "--unset", "-C", "--chdir")), 0),
    "nice": (frozenset(("-n", "--adjustment")), 0),
    "ionice": (frozenset(("-c", "--class", "-n", "--classdata")), 0),
    "numactl": (
        frozenset(("-N", "-m", "-C", "-i", "-p", "--cpunodebind", "--membind", "--physcpubind"))
        | frozenset(("--interleave", "--preferred")),
        0,
    ),
    "taskset": (_NONE, 1),
    "timeout": (frozenset(("-k", "--kill-after", "-s", "--signal")), 1),
    "uv": (
        frozenset(("-p", "--python", "--with", "--extra", "--group", "--project", "--directory"))
        | frozenset(("--package", "--env-file", "--with-editable", "--with-requirements")),
        1,
    ),
    "poetry": (frozenset(("-C", "--directory", "-P", "--project")), 1),
    "conda": (frozenset(("-n", "--name", "-p", "--prefix", "--cwd")), 1),
}
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
BETWEEN_COMMANDS = ";&|()"
# A variable that a launcher sets for each of its ranks, that with their number, and its name.
PARENTS = (
    (KEEPER, "WORLD_SIZE", "hvdrun"),
    ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "torchrun"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_RANK", "PMI_SIZE", "mpirun"),
)


def check(command: Sequence[str], environ: Mapping[str, str], is_alone: bool = True) -> None:
    """`environ`: hvdrun's own; is_alone: not each host of the job starts one. Raises UsageError."""
    if environ.get(OVERRIDE) == "1":
        return
    if child := _launcher_in(command):
        raise UsageError(
            f"{child} starts the ranks of a job itself, so each of hvdrun's ranks would start a"
            f" whole job: {_leave_out(child, f'{child} and its options', 4)}"
        )
    # srun starts an hvdrun on each host of a job, and hvdrun itself says what is wrong with that.
    if is_alone and (parent := _parent(environ)) and not is_in_step(environ):
        name, size = parent
        raise UsageError(
            f"{name} has started this hvdrun as one of {size} processes, each of which would start"
            f" a whole job: {_leave_out(name, name, size)}"
        )


def _leave_out(launcher: str, words: str, size: int) -> str:
    once = f"as in `hvdrun -np {size} python train.py`"
    if launcher == "hvdrun":
        what = f"start hvdrun once, {once}"
    else:
        what = f"leave {words} out, {once}, or leave hvdrun out"
    return f"{what}; if you mean it, set {OVERRIDE}=1"


def _launcher_in(command: Sequence[str]) -> str:
    """The name of the launcher that the command runs, or ""."""
    command = _unwrapped(command)
    if not command:
        return ""
    if os.path.basename(command[0]) in SHELLS:
        return next(filter(None, map(_launcher_in, _commands(_text_for_shell(command)))), "")
    runs = what_runs(command)
    if runs is not None and runs.kind not in (SCRIPT, MODULE):
        return ""
    name, arguments = (runs.name, runs.arguments) if runs else (command[0], command[1:])
    name = os.path.basename(name)
    if name == "accelerate":
        return "accelerate launch" if "launch" in arguments[:1] else ""
    return name if name in LAUNCHERS else ""


def _unwrapped(command: Sequence[str]) -> list[str]:
    """Without the wrappers and the variables before it."""
    words = list(command)
    while words:
        if re.match(r"\w+=", words[0]):
            del words[0]
            continue
        if (name := os.path.basename(words[0])) not in WRAPPERS:
            break
        with_value, own_words = WRAPPERS[name]
        del words[0]
        while words and (own_words or words[0].startswith("-")):
            word = words.pop(0)
            if word in with_value:
                del words[:1]
            elif not word.startswith("-"):
                own_words -= 1
    return words


def _text_for_shell(command: Sequence[str]) -> str:
    """The commands in `bash -euo pipefail -c COMMANDS`; "" if there are none."""
    words = iter(command[1:])
    for word in words:
        if not word.startswith(("-", "+")):
            break
        if not word.startswith("--"):
            if "o" in word:
                next(words, "")
            if "c" in word:
                return next(words, "")
    return ""


def _commands(text: str) -> Iterator[list[str]]:
    """Each command of a shell's text; not those within others."""
    words = shlex.shlex(text.replace("\n", ";"), posix=True, punctuation_chars=BETWEEN_COMMANDS)
    words.whitespace_split, words.commenters = True, ""
    command: list[str] = []
    with contextlib.suppress(ValueError):  # what ends within quotes
        for word in words:
            if word.strip(BETWEEN_COMMANDS):
                command.append(word)
            else:
                yield command
                command = []
    yield command


def _parent(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The launcher that has started this process as one of several ranks, and their number."""
    for mark, size_variable, name in PARENTS:
        size = environ.get(size_variable, "")
        if mark in environ and size.isdecimal() and int(size) > 1:
            return name, int(size)
    return None
