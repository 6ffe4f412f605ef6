"""Refuses programs that read from standard input what every rank needs: only rank 0 gets it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from hvdrun.errors import UsageError
from hvdrun.plan.local_facts import LocalFacts
from hvdrun.plan.python_command import MODULE, STDIN, what_runs
from hvdrun.plan.request import Request

_DEBUGGERS = r"(pdb|ipdb|pudb)3?"
_SHELLS = r"ipython3?|IPython|bpython|ptpython|code"
_OTHER_USES = ("-c", "-m", "-h", "-V", "--help", "--version")
# A debugger that is told to go on asks for commands only after a failure, or at the end.
_GOES_ON = ("c", "cont", "continue")


def check(request: Request, _: LocalFacts) -> None:
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
    if re.fullmatch(_SHELLS, program) and _is_interactive(arguments):
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
