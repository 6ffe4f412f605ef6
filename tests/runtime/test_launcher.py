"""What the environment says about who started this process."""

import os
import re

import pytest

from hvdlite.mpi import launcher_of, rank_process, started_by_rank


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
