"""What is measured where, and how long."""

import json

import pytest

from benchmarks.plan import (
    FULL,
    MIB,
    PLANS,
    Effort,
    Flavour,
    Job,
    Place,
    calls,
    job_from,
    jobs,
    plan_from,
    request_of,
    rotated,
)

OPEN_MPI, MPICH = Flavour(".a/bin/python", "multiple"), Flavour(".b/bin/python", "multiple")
SERIALIZED = Flavour(".b/bin/python", "serialized")
ALL = {"allreduce", "types", "tail", "training", "upkeep", "rig"}


def test_the_full_plan_has_all_rows_of_the_targets():
    assert FULL.sizes_bytes[0] == 4
    assert FULL.sizes_bytes[-1] == 256 * MIB
    assert FULL.ranks == (2, 4, 8)
    assert set(FULL.shapes) == {(hosts, ranks) for hosts in (2, 4) for ranks in (1, 2)}
    assert [rate for rate, _ in FULL.links] == ["", "10gbit", "1gbit"]
    assert all(16 * MIB in sizes_bytes for _, sizes_bytes in FULL.links)


@pytest.mark.parametrize("plan", PLANS.values())
def test_a_worker_is_told_its_plan_and_its_job(plan):
    job = Job(Place(2, 4, "1gbit"), MPICH, ("allreduce",), (4, 16))
    request = json.loads(json.dumps(request_of(plan, job)))
    assert request == json.loads(json.dumps(request_of(*understood(request))))
    assert understood(request)[1].place == job.place


def understood(request):
    return plan_from(request["plan"]), job_from(request["job"])


def test_every_place_is_measured_under_every_mpi():
    flavours = [OPEN_MPI, MPICH, SERIALIZED]
    found = [(job.place, job.flavour) for job in jobs(FULL, flavours, ALL - {"upkeep"}, cores=8)]
    places = [Place(ranks) for ranks in FULL.ranks]
    places += [Place(r, h, rate) for rate, _ in FULL.links for h, r in FULL.shapes]
    assert found == [(place, flavour) for place in places for flavour in flavours]


@pytest.mark.parametrize("part", ["sharded", "weighted"])
def test_steps_of_one_contender_are_timed_on_two_ranks_under_the_first_mpi(part):
    found = jobs(FULL, [OPEN_MPI, MPICH], {part, "rig"}, cores=2)
    at = [(job.place, job.flavour) for job in found if part in job.parts]
    assert at == [(Place(2), OPEN_MPI)]


def test_where_ranks_outnumber_the_cores_threads_are_not_serialized():
    found = jobs(FULL, [OPEN_MPI, MPICH, SERIALIZED], ALL, cores=2)
    assert {job.place.size for job in found if job.flavour == SERIALIZED} == {2}
    assert {job.place.size for job in found if job.flavour == MPICH} == {2, 4, 8}


def test_what_does_not_depend_on_the_mpi_is_measured_once():
    found = jobs(FULL, [OPEN_MPI, MPICH, SERIALIZED], ALL, cores=8)
    assert [job.flavour for job in found if "training" in job.parts] == [OPEN_MPI]
    places = (Place(2), Place(1, hosts=2))
    # Before anything else has used the machine.
    assert found[:4] == [
        Job(place, flavour, ("upkeep",), ()) for place in places for flavour in (OPEN_MPI, MPICH)
    ]
    assert not [job for job in found[4:] if "upkeep" in job.parts]


def test_only_what_is_wanted_is_measured():
    (job,) = jobs(FULL, [OPEN_MPI, MPICH], {"training"}, cores=2)
    assert (job.place, job.flavour, job.parts) == (Place(2), OPEN_MPI, ("training",))
    assert jobs(FULL, [OPEN_MPI], {"memory"}, cores=2) == []


def test_a_part_that_is_wanted_is_measured_and_nothing_else():
    found = jobs(FULL, [OPEN_MPI, MPICH], {"c10d", "wrapped", "rig"}, cores=2)
    assert [(job.place, job.parts) for job in found] == [
        (Place(2), ("c10d", "wrapped")),
        (Place(4), ("c10d", "wrapped")),
        (Place(1, 2, "1gbit"), ("wrapped",)),
    ]
    assert {job.flavour for job in found} == {OPEN_MPI}
    found = jobs(FULL, [OPEN_MPI, MPICH, SERIALIZED], {"reducescatter", "rig"}, cores=8)
    assert {job.parts for job in found} == {("reducescatter",)}
    assert {job.flavour for job in found} == {OPEN_MPI, MPICH}
    assert {job.place for job in found} == {Place(r, h, "1gbit") for h, r in FULL.shapes}
    assert jobs(FULL, [OPEN_MPI, MPICH, SERIALIZED], {"reducescatter"}, cores=8) == found
    (allreduce, *_) = jobs(FULL, [OPEN_MPI], {"rig"}, cores=2)
    assert allreduce.parts == ("allreduce",)


@pytest.mark.parametrize(
    ("rounds", "elapsed_s", "enough"),
    [(2, 100.0, False), (3, 0.9, False), (3, 1.0, True), (9, 0.0, False), (10, 0.0, True)],
)
def test_rounds_end_with_the_time_but_not_before_there_are_a_few(rounds, elapsed_s, enough):
    effort = Effort(max_rounds=10, budget_s=1.0, min_rounds=3)
    assert effort.enough(rounds, elapsed_s) == enough


@pytest.mark.parametrize("size_bytes", FULL.sizes_bytes)
def test_small_sizes_are_called_several_times_in_one_timing(size_bytes):
    assert (calls(size_bytes) > 1) == (size_bytes <= 16 * 1024)


def test_every_contender_is_first_as_often_as_the_others():
    firsts = [rotated(["a", "b", "c"], round_)[0] for round_ in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]


def test_a_place_is_described():
    assert str(Place(4)) == "4 ranks on one host"
    assert str(Place(1, 2)) == "2 hosts with one rank each, unshaped"
    assert str(Place(2, 4, "10gbit")) == "4 hosts with 2 ranks each, 10 Gbit/s"
    assert Place(2, 4).size == 8
