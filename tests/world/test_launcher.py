"""hvdlite finds out from the environment which launcher started the process."""

import os
import re
import sys

import pytest

import hvdlite as hvd
from hvdlite.errors import LaunchError
from hvdlite.world.bootstrap.mpi import (
    is_step_without_pmi,
    is_task_of_a_rank,
    launcher_of,
    rank_process,
    started_by_rank,
)
from hvdlite.world.bootstrap.torch_place import TORCH_VARIABLES, check_alone
from tests.harness.programs import run_program


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": ""},
    ],
)
def test_without_a_per_task_variable_nobody_did(environ):
    assert launcher_of(environ) is None


@pytest.mark.parametrize(
    ("environ", "size", "text"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, 4, "Open MPI.*OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_SIZE": "2"}, 2, "MPICH.*PMI_SIZE=2"),
        ({"PMIX_RANK": "1"}, None, "PMIx.*PMIX_RANK=1"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, 3, "srun.*SLURM_STEP_NUM_TASKS=3"),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "2"}, 2, "PMI_SIZE=2"),
    ],
)
def test_a_per_task_variable_tells_who_did_and_of_how_many(environ, size, text):
    found = launcher_of(environ)
    assert found is not None
    assert found[1] == size
    assert re.search(text, found[0])


@pytest.mark.parametrize(
    ("more", "without"),
    [
        ({}, True),
        ({"SLURM_STEP_NUM_NODES": "2"}, False),
        ({"PMIX_RANK": "0"}, False),
        ({"PMI_SIZE": "2"}, False),
        ({"SLURM_STEP_NUM_TASKS": ""}, False),
    ],
)
def test_a_step_of_slurm_on_one_node_may_have_no_pmi(more, without):
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    assert is_step_without_pmi({**step, **more}) == without


def test_what_a_rank_starts_knows_its_rank_by_the_inherited_variable(monkeypatch):
    environ = {"PMI_RANK": "1", "PMI_FD": "7"}
    value = rank_process(environ)
    assert started_by_rank(value, environ) is None, "the rank itself"
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert started_by_rank(value, environ) == int(value.partition(":")[0])


@pytest.mark.parametrize("value", ["", "12", "x:///"])
def test_without_that_variable_a_process_is_no_ranks_child(value):
    assert started_by_rank(value, {"PMI_RANK": "1"}) is None


def test_a_process_that_another_launcher_starts_is_no_ranks_child(monkeypatch):
    value = rank_process({"PMIX_NAMESPACE": "a", "PMIX_RANK": "0"})
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert started_by_rank(value, {"PMIX_NAMESPACE": "b", "PMIX_RANK": "0"}) is None


def test_a_job_that_a_rank_starts_without_mpi_has_no_task_of_its_own(monkeypatch):
    """torchrun, for instance: its ranks inherit a task that is another process's in MPI."""
    task = {"PMIX_NAMESPACE": "a", "PMIX_RANK": "0"}
    value = rank_process({**task, "MASTER_PORT": "1"})
    inner = {**task, "MASTER_PORT": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert not is_task_of_a_rank(value, {**task, "MASTER_PORT": "1"}), "the rank itself"
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert is_task_of_a_rank(value, inner)
    assert started_by_rank(value, inner) is None
    assert not is_task_of_a_rank(value, {**inner, "PMIX_NAMESPACE": "b"})
    assert not is_task_of_a_rank("", inner)


def test_a_ranks_child_may_have_lost_the_launchers_variables(monkeypatch):
    value = rank_process({"PMIX_NAMESPACE": "a/b", "PMIX_RANK": "0"})
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert started_by_rank(value, {"PMIX_NAMESPACE": "a/b"}) == int(value.partition(":")[0])


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "4", "RANK": "", "LOCAL_RANK": ""},
        {"WORLD_SIZE": "four", "RANK": "0"},
        {"RANK": "1", "LOCAL_RANK": "1"},
        {"SLURM_NTASKS": "8"},
    ],
)
def test_a_process_of_a_job_of_one_is_alone(environ):
    check_alone(environ)


@pytest.mark.parametrize("of_task", TORCH_VARIABLES[1:])
def test_one_of_several_processes_that_can_not_meet_is_told_how_to_start(of_task):
    with pytest.raises(LaunchError) as raised:
        check_alone({"WORLD_SIZE": "12", of_task: "0", "MASTER_ADDR": "server1"})
    assert str(raised.value) == (
        f"12 processes were started without an MPI launcher (WORLD_SIZE=12, {of_task}=0), and "
        "without all of RANK, MASTER_ADDR and MASTER_PORT, by which they could meet, so each "
        "would be a world of one; start them with `hvdrun -np 12 python train.py` (on several "
        "hosts with -H host1:4,host2:4) or with torchrun, or set HVDLITE_ALONE=1 if each should be "
        "a world of one"
    )


class OfOne:
    """A communicator."""

    def Get_size(self):
        return 1


@pytest.mark.parametrize("comm", [None, [0], OfOne()])
def test_whatever_communicator_of_one_it_begins_with(comm, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(LaunchError, match="2 processes were started without an MPI launcher"):
        hvd.init(comm)
    assert not hvd.is_initialized()


TRAIN = """
import hvdlite as hvd
hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()}")
"""


def test_a_world_of_one_can_be_asked_for():
    asked = ("env", "WORLD_SIZE=2", "RANK=1", "HVDLITE_ALONE=1")
    done = run_program([*asked, sys.executable, "-c", TRAIN], limit_s=60)
    assert (done.code, done.stdout) == (0, "rank 0 of 1\n"), done


def where():
    hvd.init()
    return hvd.rank(), hvd.size()


@pytest.mark.ranks(2)
def test_under_an_mpi_launcher_they_mean_nothing(world):
    wrong = {"WORLD_SIZE": "7", "RANK": "5"}
    assert world.run(where, knobs=wrong) == [(0, 2), (1, 2)]
