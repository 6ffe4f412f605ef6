"""What the user's command runs, and which programs can't be the ranks of a job: those that read
from standard input what every rank needs, launchers, and scripts that can't run by themselves."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hvdrun.errors import CommandNotFound, UsageError
from hvdrun.machine.environment import KEEPER, is_in_step
from hvdrun.plan.facts import LocalFacts
from hvdrun.plan.request import Request

SCRIPT, MODULE, CODE, STDIN = "script", "module", "code", "stdin"
_PYTHON = r"(python|pypy)[\d.]*"
_STDIN_FILES = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


class Runs(NamedTuple):
    kind: str
    name: str  # of the script or module
    arguments: tuple[str, ...] = ()


def what_runs(command: Sequence[str]) -> Runs | None:
    """None if the command is not Python's, or only prints something, as `python --version`."""
    if not command or not re.fullmatch(_PYTHON, os.path.basename(command[0])):
        return None
    words = list(command[1:])
    while words:
        word = words.pop(0)
        if word == "-":
            return Runs(STDIN, word, tuple(words))
        if not word.startswith("-"):
            return Runs(STDIN if word in _STDIN_FILES else SCRIPT, word, tuple(words))
        if word.startswith("--"):
            if word != "--check-hash-based-pycs":
                return None  # --help, --version
            del words[:1]
            continue
        for at, letter in enumerate(word[1:], 2):
            if letter in "hV?":
                return None
            if letter in "cmWX":
                value = word[at:] or (words.pop(0) if words else "")
                if letter in "cm":
                    return Runs(CODE if letter == "c" else MODULE, value, tuple(words))
                break
    return Runs(STDIN, "", ())


# ------------------------------------------- standard input, which only rank 0 gets

_DEBUGGERS = r"(pdb|ipdb|pudb)3?"
_PYTHON_SHELLS = r"ipython3?|IPython|bpython|ptpython|code"
_OTHER_USES = ("-c", "-m", "-h", "-V", "--help", "--version")
# A debugger that is told to go on asks for commands only after a failure, or at the end.
_GOES_ON = ("c", "cont", "continue")


def check_stdin(request: Request, _: LocalFacts) -> None:
    """Raises UsageError if the program can't run on several ranks."""
    command, num_proc = request.command, request.num_proc
    if num_proc in (None, 1) or not command:
        return
    program, arguments = os.path.basename(command[0]), tuple(command[1:])
    shown = program
    runs = what_runs(command)
    if runs is not None:
        if runs.kind == STDIN:
            shown = f"{program} {runs.name}".strip()
            raise _no_program(shown, num_proc)
        if runs.kind != MODULE:
            return
        program, arguments = runs.name, runs.arguments
        shown += f" -m {program}"
    if re.fullmatch(_DEBUGGERS, program) and not _is_told_to_go_on(arguments):
        raise UsageError(
            f"`{shown}` asks each of the {num_proc} ranks for commands, and only rank 0 gets"
            " standard input: put `if hvd.rank() == 0: breakpoint()` into the script and start it"
            f" with python, or debug one rank with `hvdrun -np 1 {shown} …`"
        )
    if re.fullmatch(_PYTHON_SHELLS, program) and _is_interactive(arguments):
        raise _no_program(shown, num_proc)


def _no_program(shown: str, num_proc: int) -> UsageError:
    others = "the other rank" if num_proc == 2 else f"the other {num_proc - 1} ranks"
    return UsageError(
        f"`{shown}` reads its program from standard input, which only rank 0 gets, so {others}"
        f" would run nothing: write it to a file and run `hvdrun -np {num_proc} python FILE`;"
        f" `hvdrun -np 1 {shown}` works"
    )


def _is_interactive(arguments: Sequence[str]) -> bool:
    """Whether a shell for Python has no file to run."""
    return all(word.startswith("-") and not word.startswith(_OTHER_USES) for word in arguments)


def _is_told_to_go_on(arguments: Sequence[str]) -> bool:
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return any(
        (option in ("-c", "--command") and value in _GOES_ON)
        or option in {f"{prefix}{word}" for prefix in ("-c", "--command=") for word in _GOES_ON}
        for option, value in pairs
    )


# ------------------------------------------- launchers: each rank would start a whole set of ranks

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


def check_nesting(
    command: Sequence[str], environ: Mapping[str, str], is_alone: bool = True
) -> None:
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


# ------------------------------------------- a script without `python`, the commonest mistake


def which(command: Sequence[str], path: str, shells_path: str) -> str:
    """For --verbose: what the name means to ranks with that PATH, and to the shell if that differs;
    "" for a path."""
    name = command[0]
    found = shutil.which(name, path=path)
    if "/" in name or found is None:
        return ""
    shells = shutil.which(name, path=shells_path)
    differs = f"; your shell's is {shells}" if shells else ""
    return f"{name} is {found}" + (differs if shells != found else "")


def check_script(command: Sequence[str], cwd: str, path: str) -> None:
    """For ranks that run on this machine, in `cwd` and with that PATH.

    Raises CommandNotFound if they could not run the script by itself.
    """
    name = command[0]
    file = os.path.join(cwd, name)
    if not name.endswith(".py") or not os.path.isfile(file):
        return
    if "/" not in name:
        if shutil.which(name, path=path):
            return
        why = "it is not in PATH"
    elif not os.access(file, os.X_OK):
        why = "it is not executable"
    elif not _has_interpreter(file):
        why = "it has no #! line"
    else:
        return
    meant = shlex.join(["python", name.removeprefix("./"), *command[1:]])
    raise CommandNotFound(f"{name!r} can't run by itself: {why}; did you mean `hvdrun … {meant}`?")


def _has_interpreter(file: str) -> bool:
    try:
        with open(file, "rb") as script:
            return script.read(2) == b"#!"
    except OSError:
        return True
