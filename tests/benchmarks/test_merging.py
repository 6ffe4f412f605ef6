"""What a run that measures some parts keeps of an earlier one."""

from benchmarks.merging import merged
from benchmarks.report import remarks

TWO = {"place": {"ranks": 2}, "mpi": "Open MPI", "mpi_version": "5"}
FIRST = {
    "host": {"commit": "a", "load_before": 0.0},
    "not_measured": [],
    "failed": ["a job"],
    "runs": [{**TWO, "allreduce": [1], "wrapped": [2]}, {**TWO, "c10d": [3]}],
    "memory": {"pss_bytes": {}},
}


def measured(commit, **parts):
    host = {"commit": commit, "load_before": 0.0}
    return {"host": host, "not_measured": [], "failed": [], "runs": [{**TWO, **parts}]}


def test_what_is_measured_again_replaces_what_was_measured_and_the_rest_stays():
    found = merged(measured("b", wrapped=[4], c10d=[5]), FIRST)
    assert found["runs"] == [{**TWO, "allreduce": [1]}, {**TWO, "wrapped": [4], "c10d": [5]}]
    assert found["memory"] == FIRST["memory"]
    assert found["failed"] == []
    assert found["host"]["commit"] == "b"


def test_each_part_is_shown_with_the_host_and_the_commit_it_was_measured_on():
    found = merged(measured("b", wrapped=[4]), FIRST)
    assert found["earlier"] == [{"parts": ["allreduce", "c10d", "memory"], "host": FIRST["host"]}]
    found = merged(measured("c", c10d=[5]), found)
    assert [(origin["parts"], origin["host"]["commit"]) for origin in found["earlier"]] == [
        (["allreduce", "memory"], "a"),
        (["wrapped"], "b"),
    ]
    assert remarks(found)[0] == (
        "Of an earlier run: allreduce, memory; measured on: commit a, load_before 0.0."
    )
    everything = {"allreduce": [1], "wrapped": [2], "c10d": [3]}
    found = merged({**measured("d", **everything), "memory": {"pss_bytes": {}}}, found)
    assert found["earlier"] == []
