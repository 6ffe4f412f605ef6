"""Programs that need standard input on every rank, which only rank 0 gets."""

import pytest

from hvdrun.errors import UsageError
from hvdrun.plan.python_command import CODE, MODULE, SCRIPT, STDIN, Runs, what_runs
from hvdrun.plan.request import Request
from hvdrun.plan.stdin_programs import check as check_request
from tests.launcher.plan.test_command import FACTS


def check(words, num_proc):
    check_request(Request(tuple(words), num_proc), FACTS)


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("python train.py -c x", Runs(SCRIPT, "train.py", ("-c", "x"))),
        ("/venv/bin/python3.12 -u -W ignore -Xdev train.py", Runs(SCRIPT, "train.py")),
        ("python --check-hash-based-pycs never train.py", Runs(SCRIPT, "train.py")),
        ("python -c pass -", Runs(CODE, "pass", ("-",))),
        ("python -ucpass x", Runs(CODE, "pass", ("x",))),
        ("python -m pkg.train --lr 1", Runs(MODULE, "pkg.train", ("--lr", "1"))),
        ("pypy3 -Bmpkg", Runs(MODULE, "pkg")),
        ("python -", Runs(STDIN, "-")),
        ("python -i", Runs(STDIN, "")),
        ("python -u /dev/stdin x", Runs(STDIN, "/dev/stdin", ("x",))),
        ("python", Runs(STDIN, "")),
        ("python -W", Runs(STDIN, "")),
        ("python --version", None),
        ("python -VV", None),
        ("pythonic", None),
        ("sh -c python", None),
    ],
)
def test_what_a_command_of_python_runs(line, runs):
    assert what_runs(line.split()) == runs


@pytest.mark.parametrize(
    "line",
    [
        "python train.py -",
        "python -i train.py",
        "python -c x",
        "python -m pkg.train",
        "python -m pdb -c continue train.py",
        "python -m pdb -cc train.py",
        "python --version",
        "ipython train.py",
        "ipython --version",
        "ipython -c=x",
        "sh -c date",
        "sh",
        "cat",
        "gdb -ex run --args python train.py",
    ],
)
def test_a_program_that_every_rank_can_run_is_run(line):
    check(line.split(), 4)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/venv/bin/python -", "python -"),
        ("python -u", "python"),
        ("python3 /dev/stdin", "python3 /dev/stdin"),
        ("ipython", "ipython"),
        ("ipython --pylab", "ipython"),
        ("python -m IPython", "python -m IPython"),
        ("python -m code", "python -m code"),
    ],
)
def test_a_program_from_standard_input_is_refused_on_several_ranks(line, shown):
    check(line.split(), 1)
    with pytest.raises(UsageError) as caught:
        check(line.split(), 3)
    assert str(caught.value).startswith(
        f"`{shown}` reads its program from standard input, which only rank 0 gets, so the other 2"
        " ranks would run nothing: write it to a file and run `hvdrun -np 3 python FILE`"
    )


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("python -m pdb train.py", "python -m pdb"),
        ("python -um pdb -m pkg", "python -m pdb"),
        ("python -m pdb -c next train.py", "python -m pdb"),
        ("ipdb3 train.py", "ipdb3"),
    ],
)
def test_a_debugger_is_refused_on_several_ranks(line, shown):
    check(line.split(), 1)
    with pytest.raises(UsageError) as caught:
        check(line.split(), 2)
    assert str(caught.value).startswith(
        f"`{shown}` asks each of the 2 ranks for commands, and only rank 0 gets standard input: put"
        " `if hvd.rank() == 0: breakpoint()` into the script"
    )
