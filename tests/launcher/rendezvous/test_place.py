"""Which node this is, from options and from what platforms set."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.errors import UsageError
from hvdrun.rendezvous.place import PORT, Place, by_options, by_variables, shares


def tf_config(kind, index, **cluster):
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}


WORKERS = ["w0.svc:2222", "w1.svc:2222"]
TORCH = {"MASTER_ADDR": "train-0", "MASTER_PORT": "23456", "NNODES": "4", "NODE_RANK": "3"}

FOUND = {
    "workers of TF_CONFIG": (
        tf_config("worker", 1, worker=WORKERS),
        ("w0.svc", 2222, 1, 2, "TF_CONFIG", 0),
    ),
    "the chief comes first": (
        tf_config("worker", 0, worker=WORKERS, chief=["c:2222"]),
        ("c", 2222, 1, 3, "TF_CONFIG", 0),
    ),
    "so does a master": (
        tf_config("master", 0, worker=WORKERS, master=["m:1"]),
        ("m", 1, 0, 3, "TF_CONFIG", 0),
    ),
    "servers come last": (
        tf_config("ps", 1, ps=["p0:1", "p1:1"], worker=WORKERS, chief=["c:2222"]),
        ("c", 2222, 4, 5, "TF_CONFIG", 2),
    ),
    "an evaluator is no node": (
        tf_config("worker", 1, worker=WORKERS, evaluator=["e:1"]),
        ("w0.svc", 2222, 1, 2, "TF_CONFIG", 0),
    ),
    "an index in quotes": (
        tf_config("worker", "1", worker=WORKERS),
        ("w0.svc", 2222, 1, 2, "TF_CONFIG", 0),
    ),
    "a cluster without ports": (
        tf_config("worker", 0, worker=["a", "b"]),
        ("a", PORT, 0, 2, "TF_CONFIG", 0),
    ),
    "torch's variables": (
        TORCH,
        ("train-0", 23456, 3, 4, "MASTER_ADDR, NODE_RANK, NNODES", 0),
    ),
    "torchrun's own": (
        {
            "PET_MASTER_ADDR": "fd00::1",
            "PET_MASTER_PORT": "9",
            "PET_NNODES": "2",
            "PET_NODE_RANK": "0",
        },
        ("fd00::1", 9, 0, 2, "PET_MASTER_ADDR, PET_NODE_RANK, PET_NNODES", 0),
    ),
    "torchrun's endpoint": (
        {"PET_RDZV_ENDPOINT": "a:77", "PET_NNODES": "2:2", "PET_NODE_RANK": "1"},
        ("a", 77, 1, 2, "PET_RDZV_ENDPOINT, PET_NODE_RANK, PET_NNODES", 0),
    ),
    "an Indexed Job": (
        {"MASTER_ADDR": "job-0.job", "NNODES": "2", "JOB_COMPLETION_INDEX": "1"},
        ("job-0.job", PORT, 1, 2, "MASTER_ADDR, JOB_COMPLETION_INDEX, NNODES", 0),
    ),
    "SageMaker": (
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
        ("algo-1", PORT, 1, 2, "SM_HOSTS", 0),
    ),
}


@pytest.mark.parametrize(("environ", "place"), FOUND.values(), ids=FOUND)
def test_a_platform_tells_by_its_variables(environ, place):
    assert by_variables(environ) == Place(*place)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"MASTER_PORT": "tcp://10.3.2.1:80"},  # Kubernetes' variable of a service "master"
        {**TORCH, "NNODES": "1", "NODE_RANK": "0"},
        {**TORCH, "HVDRUN_KEEPER": "77"},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": ""},
        tf_config("worker", 0, worker=["only:1"]),
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "0", "WORLD_SIZE": "4"},
        {"JOB_COMPLETION_INDEX": "2"},  # of pods that have nothing to do with each other
        {"NODE_RANK": "2", "HVDRUN_KEEPER": "77"},
        {"NODE_RANK": "2", "TF_CONFIG": tf_config("worker", 0, worker=["only:1"])["TF_CONFIG"]},
        {"NODE_RANK": "2", "NNODES": "1"},
    ],
)
def test_a_job_of_one_host_starts_here_and_so_does_one_within_a_rank(environ):
    assert by_variables(environ) is None


WRONG = {
    "TF_CONFIG is not JSON": {"TF_CONFIG": "{"},
    "expected lists of hosts": {"TF_CONFIG": '{"cluster": {"worker": "a"}}'},
    '"task": expected an object': {"TF_CONFIG": '{"cluster": {"worker": ["a", "b"]}}'},
    "task.type: expected one of chief": tf_config("tpu", 0, worker=WORKERS),
    "task.index: expected a number below 2": tf_config("worker", 2, worker=WORKERS),
    "takes no part in the training job": tf_config(
        "evaluator", 0, worker=WORKERS, evaluator=["e:1"]
    ),
    "only parameter servers": tf_config("ps", 0, ps=["a:1", "b:1"]),
    "is not HOST:PORT": tf_config("worker", 0, worker=["a:b:c", "d"]),
    "NNODES=4 says .* MASTER_ADDR and NODE_RANK are not set": {"NNODES": "4"},
    "MASTER_ADDR is not set": {"NNODES": "4", "NODE_RANK": "1"},
    "^NODE_RANK=1 says .* but NNODES is not set": {
        "MASTER_ADDR": "x",
        "NODE_RANK": "1",
        "WORLD_SIZE": "4",
    },
    "PET_NODE_RANK=10 says .* unset PET_NODE_RANK": {"PET_NODE_RANK": "10"},
    "NODE_RANK=x: expected a number": {**TORCH, "NODE_RANK": "x"},
    "MASTER_PORT=99999: expected a port": {**TORCH, "MASTER_PORT": "99999"},
    "numbered from 0 to 3": {**TORCH, "NODE_RANK": "4"},
    "on a fixed number of hosts": {**TORCH, "NNODES": "1:4"},
    "not among SM_HOSTS": {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"},
}


@pytest.mark.parametrize(("says", "environ"), WRONG.items(), ids=WRONG)
def test_what_a_platform_says_wrongly_is_an_error_and_not_a_job_of_one_host(says, environ):
    with pytest.raises(UsageError, match=says):
        by_variables(environ)


def test_options_tell_everything():
    assert by_options("h:5", 1, 2, {}) == Place("h", 5, 1, 2, "--rendezvous")
    assert by_options("[fd00::1]:5", 0, 2, {}).meets_at == "[fd00::1]:5"
    assert by_options("h", 0, 2, {}).port == PORT
    assert by_options(None, None, None, TORCH) is None


def test_what_options_leave_out_comes_from_the_platform():
    environ = {"JOB_COMPLETION_INDEX": "2", "NNODES": "3"}
    source = "--rendezvous and NNODES and JOB_COMPLETION_INDEX"
    assert by_options("h:5", None, None, environ) == Place("h", 5, 2, 3, source)
    assert by_options("h:5", 1, None, environ).node_rank == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("h:5", 0, None), "of how many hosts"),
        (("h:5", None, 2), "which of the 2 hosts is this"),
        (("h:5", 2, 2), "numbered from 0 to 1"),
        ((None, 1, None), "--node-rank 1 needs --rendezvous"),
        ((None, None, 2), "--nodes 2 needs --rendezvous"),
        (("h:0", 0, 2), "is not HOST:PORT"),
        (("h:99999", 0, 2), "is not HOST:PORT"),
        (("-oProxyCommand=x", 0, 2), "is not HOST:PORT"),
        (("fd00::1", 0, 2), "an IPv6 address in brackets"),
    ],
)
def test_options_that_do_not_suffice_say_what_is_missing(given, says):
    with pytest.raises(UsageError, match=says):
        by_options(*given, {})


def place_of(nodes, servers=0):
    return Place("h", 1, 0, nodes, "here", servers)


@pytest.mark.parametrize(
    ("nodes", "servers", "num_proc", "slots", "expected"),
    [
        (2, 0, 4, (8, 8), [2, 2]),
        (2, 0, 5, (8, 8), [3, 2]),
        (2, 0, 12, (8, 4), [8, 4]),
        (3, 0, 12, (8, 2, 8), [5, 2, 5]),
        (2, 0, 12, (2, 2), [6, 6]),
        (3, 1, 5, (8, 8, 8), [2, 2, 1]),
        (2, 0, None, (8, 4), [None, None]),
        (3, 1, None, (8, 8, 8), [None, None, 1]),
    ],
)
def test_processes_are_shared_out_evenly_within_the_slots(
    nodes, servers, num_proc, slots, expected
):
    assert shares(place_of(nodes, servers), num_proc, slots) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 60))
def test_all_processes_are_given_away_and_no_node_is_left_out(slots, more):
    num_proc = len(slots) + more
    found = shares(place_of(len(slots)), num_proc, slots)
    assert sum(found) == num_proc
    assert min(found) > 0
    if num_proc <= sum(slots):
        assert all(count <= there for count, there in zip(found, slots, strict=True))
    else:
        assert max(found) - min(found) <= 1


def test_fewer_processes_than_hosts_are_refused():
    with pytest.raises(UsageError, match="-np 2 or more"):
        shares(place_of(2), 1, (4, 4))
