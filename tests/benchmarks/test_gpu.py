"""What `make bench-gpu` measures, and how it shows it."""

import pytest

from benchmarks.gpu.__main__ import plan
from benchmarks.gpu.tables import lines


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("cuda", 4)])
def test_each_job_can_be_chosen_by_its_title(device, gpus):
    jobs = plan(device, gpus, 6.0)
    assert len({job.title for job in jobs}) == len(jobs)
    assert {job.part for job in jobs} == {"steps", "operations", "c10d"}


def test_ranks_that_share_a_gpu_have_an_nccl_hostid_each():
    worlds = [job.world for job in plan("cuda", 1, 6.0) if "NCCL on one GPU" in job.title]
    assert {world.variables["OWN_NCCL_HOSTID"] for world in worlds} == {"1"}
    assert not any("OWN_NCCL_HOSTID" in job.world.variables for job in plan("cuda", 4, 6.0))


def test_a_peers_time_is_shown_over_ours():
    result = {"median_us": {"4096": {"hvdlite": 200.0, "gloo": 500.0}}}
    *_, row = lines({"title": "operations", "part": "operations", "result": result})
    assert row.split() == ["4096", "200", "500", "2.50"]


def test_a_job_that_failed_shows_what_it_printed():
    job = {"title": "x", "part": "steps", "failed": "exit code 1", "output": ["no memory"]}
    assert lines(job)[2:] == ["FAILED: exit code 1", "    no memory"]
