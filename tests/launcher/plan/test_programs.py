"""Which programs can't be the ranks of a job: those that read standard input, and launchers."""

import shlex

import pytest

from hvdrun.errors import UsageError
from hvdrun.plan.programs import (
    CODE,
    MODULE,
    SCRIPT,
    STDIN,
    Runs,
    check_nesting,
    check_stdin,
    what_runs,
)
from hvdrun.plan.request import Request
from tests.launcher.plan.test_command import FACTS


def check(words, num_proc):
    check_stdin(Request(tuple(words), num_proc), FACTS)


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


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc-per-node 2 t.py", "torchrun"),
        ("/venv/bin/torchrun t.py", "torchrun"),
        ("python -m torch.distributed.run t.py", "torch.distributed.run"),
        ("python /venv/bin/torchrun t.py", "torchrun"),
        ("mpirun -np 2 python t.py", "mpirun"),
        ("mpiexec.hydra python t.py", "mpiexec.hydra"),
        ("srun python t.py", "srun"),
        ("accelerate launch t.py", "accelerate launch"),
        ("env -u Y X=1 torchrun t.py", "torchrun"),
        ("/usr/bin/env -C / X=1 python -m torch.distributed.run t.py", "torch.distributed.run"),
        ("nice -n 10 accelerate launch t.py", "accelerate launch"),
        ("numactl --cpunodebind=0 -m 0 torchrun t.py", "torchrun"),
        ("taskset -c 0-3 torchrun t.py", "torchrun"),
        ("timeout -k 5 1h nohup torchrun t.py", "torchrun"),
        ("uv run --with torch -- torchrun t.py", "torchrun"),
        ("poetry run torchrun t.py", "torchrun"),
        ("conda run -n env torchrun t.py", "torchrun"),
        ("bash -c 'torchrun t.py'", "torchrun"),
        ("env X=1 bash -euo pipefail -lc 'cd /a/b.c&&X=1 exec torchrun t.py'", "torchrun"),
        ("sh -c 'echo \"it is;\" # it\nnice srun python t.py; echo'", "srun"),
    ],
)
def test_a_launcher_as_the_program_is_an_error_that_names_it(command, name):
    says = f"^{name} starts the ranks .*leave {name} and its options out, .* leave hvdrun out"
    with pytest.raises(UsageError, match=says):
        check_nesting(shlex.split(command), {})
    check_nesting(shlex.split(command), {"HVDLITE_NESTED": "1"})


@pytest.mark.parametrize(
    ("command", "environ"),
    [
        ("hvdrun -np 2 python t.py", {}),
        ("python -m hvdrun python t.py", {}),
        ("python t.py", {"HVDRUN_KEEPER": "7", "WORLD_SIZE": "2"}),
    ],
)
def test_of_two_hvdruns_none_is_to_be_left_out(command, environ):
    with pytest.raises(UsageError, match=r"whole job: start hvdrun once, as in `hvdrun -np [24]"):
        check_nesting(command.split(), environ)


@pytest.mark.parametrize(
    "command",
    [
        *("python t.py torchrun", "accelerate env", "./mpirun.sh", "python -c torchrun", ""),
        *("env X=torchrun python t.py", "timeout 9 python t.py torchrun", "nice", "uv run"),
        *("bash t.sh -c torchrun", "bash -c 'echo torchrun'", "bash -c", 'sh -c "it\'s" torchrun'),
    ],
)
def test_other_programs_are_none(command):
    check_nesting(shlex.split(command), {})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "3"}, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}, "mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, "mpirun"),
        ({"HVDRUN_KEEPER": "7", "WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, "hvdrun"),
    ],
)
def test_a_launcher_that_has_started_hvdrun_on_several_ranks_is_an_error(environ, name):
    with pytest.raises(UsageError, match=f"^{name} has started this hvdrun as one of 3 processes"):
        check_nesting(["python", "t.py"], environ)
    check_nesting(["python", "t.py"], {**environ, "HVDLITE_NESTED": "1"})
    check_nesting(["python", "t.py"], environ, is_alone=False)
    check_nesting(["python", "t.py"], {n: "1" if v == "3" else v for n, v in environ.items()})


def test_the_variables_of_a_container_or_of_srun_are_no_launchers():
    check_nesting(["python", "t.py"], {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a"})
    check_nesting(["python", "t.py"], {"SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMI_SIZE": "3"})
