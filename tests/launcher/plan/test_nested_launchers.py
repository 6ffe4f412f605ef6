"""Two launchers of which one starts the other."""

import shlex

import pytest

from hvdrun.errors import UsageError
from hvdrun.plan.nested_launchers import check


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
        check(shlex.split(command), {})
    check(shlex.split(command), {"HVDLITE_NESTED": "1"})


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
        check(command.split(), environ)


@pytest.mark.parametrize(
    "command",
    [
        *("python t.py torchrun", "accelerate env", "./mpirun.sh", "python -c torchrun", ""),
        *("env X=torchrun python t.py", "timeout 9 python t.py torchrun", "nice", "uv run"),
        *("bash t.sh -c torchrun", "bash -c 'echo torchrun'", "bash -c", 'sh -c "it\'s" torchrun'),
    ],
)
def test_other_programs_are_none(command):
    check(shlex.split(command), {})


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
        check(["python", "t.py"], environ)
    check(["python", "t.py"], {**environ, "HVDLITE_NESTED": "1"})
    check(["python", "t.py"], environ, is_alone=False)
    check(["python", "t.py"], {n: "1" if v == "3" else v for n, v in environ.items()})


def test_the_variables_of_a_container_or_of_srun_are_no_launchers():
    check(["python", "t.py"], {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a"})
    check(["python", "t.py"], {"SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMI_SIZE": "3"})
