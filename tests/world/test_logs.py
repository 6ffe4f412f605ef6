"""What `init` and DistributedOptimizer say to the logger, by its level."""

import sys

import pytest

from hvdlite.world.telling import logs
from hvdrun.knobs import LOG_LEVELS
from tests.harness.programs import run_program
from tests.harness.worlds import python_of

SCRIPT = """
import logging, sys, torch
{setup}
import hvdlite as hvd
hvd.init()
model = torch.nn.Linear(3, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), 0)
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.wide)])
def test_the_level_debug_shows_the_world_each_rank_the_settings_and_the_buckets(mpi):
    options = ["-np", "2", "--log-level", "debug", "--deterministic"]
    python = python_of(mpi)
    command = [python, "-m", "hvdrun", *options, python, "-c", SCRIPT.format(setup="")]
    done = run_program(command, limit_s=60)
    assert done.code == 0, done
    said = [line.partition("hvdlite: ")[2] for line in done.stderr.splitlines()]
    name = {"openmpi": "Open MPI", "mpich": "MPICH"}[mpi]
    (world,) = [line for line in said if line.startswith("INFO: rank 0: a world of 2 ranks (2 on ")]
    assert name in world
    settings = (
        "settings that are not the defaults: HVDLITE_DETERMINISTIC=1, HVDLITE_LOG_LEVEL=debug"
    )
    assert f"INFO: rank 0: {settings}" in said
    for rank in (0, 1):
        begin = f"INFO: rank {rank}: process "
        (own,) = [line for line in said if line.startswith(begin)]
        assert f"local rank {rank} of 2, " in own
        assert "thread" in own
        assert "GPU" in own or "cuda:" in own
    assert [line for line in said if line.startswith("DEBUG: rank 0: algorithms for 2 hosts: ")]
    (buckets,) = [line for line in said if "bucket" in line]
    assert buckets == "DEBUG: rank 0: DistributedOptimizer.0.0: 2 gradients in 1 bucket of 32 bytes"


def alone(setup, level):
    command = ["env", f"HVDLITE_LOG_LEVEL={level}", sys.executable, "-c"]
    return run_program([*command, SCRIPT.format(setup=setup)], limit_s=60)


def test_the_level_warning_shows_nothing_of_it():
    assert alone("", "warning").stderr == ""


def test_where_the_script_has_set_up_logging_each_line_is_shown_once_in_its_form():
    setup = "logging.basicConfig(format='mine: %(message)s')"
    lines = alone(setup, "info").stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("mine: rank 0: ") for line in lines)


def test_every_level_of_the_knob_is_one_of_pythons():
    assert set(logs.LEVELS) == set(LOG_LEVELS)
