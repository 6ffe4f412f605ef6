"""That the benchmark checks what it times, and that it runs."""

import json
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import instructions, passes, rig
from benchmarks.allreduce import PERIODS, Contender, expected_sum, pattern, time_count
from benchmarks.copies import VARIANTS
from benchmarks.figures import (
    ALONE,
    BOUND,
    DATASET,
    DATASETS,
    DDP,
    EQUAL,
    FLOOR,
    FSDP2,
    HALVES,
    ONES,
    OURS,
    PASSES,
    PLAIN,
    PLAN,
    SCALED,
    SHARDED,
    SHARED,
    SYNCHRONOUS,
    UNEQUAL,
    ZERO,
)
from benchmarks.plan import MIB, TINY, Effort, Flavour, Job, Place
from benchmarks.star import Centre, Ray
from benchmarks.starting import run_jobs
from benchmarks.streams import PART_BYTES, Streams
from benchmarks.tail import time_calls
from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.worlds import ROOT

COUNT = 1 << 14
FIVE_ROUNDS = Effort(max_rounds=5, budget_s=1000.0)


class TwoRanks:
    """A communicator in which this is rank 0 of 2, for contenders that need no other rank."""

    rank, size = 0, 2

    def Barrier(self):
        pass

    def bcast(self, value):
        return value

    def allgather(self, value):
        return [value, value]


@pytest.mark.parametrize("dtype", PERIODS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 22, 23, 4092, 4093, 8187])
def test_the_expected_sum_is_that_of_the_patterns(dtype, size, count):
    patterns = torch.stack([pattern(count, rank, size, dtype) for rank in range(size)])
    assert torch.equal(patterns.double().sum(dim=0), expected_sum(count, size, dtype).double())


def adds_the_other_ranks_input(buffer):
    return lambda: buffer.mul_(2).add_(1)  # rank 1's input is rank 0's + 1, shift included


@pytest.mark.parametrize("dtype", PERIODS, ids=str)
def test_a_right_sum_is_timed_once_per_round(dtype):
    contenders = {"right": Contender(adds_the_other_ranks_input, dtype)}
    times_s = time_count(COUNT, FIVE_ROUNDS, TwoRanks(), contenders)
    assert len(times_s["right"]) == 5


WRONG = [
    lambda buffer: buffer,  # nothing was sent
    lambda buffer: buffer.mul_(2),  # a rank was counted twice
    lambda buffer: buffer.copy_(buffer.mul(2).add(1).roll(1)),  # shifted by one
]


@pytest.mark.parametrize("dtype", PERIODS, ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_sum_is_no_result(dtype, wrong):
    contenders = {"broken": Contender(lambda buffer: lambda: wrong(buffer), dtype)}
    with pytest.raises(AssertionError, match="broken: wrong sum of 64 KiB on rank 0"):
        time_count(COUNT, FIVE_ROUNDS, TwoRanks(), contenders)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_sum_of_a_single_call_is_none_either(wrong):
    contenders = {"broken": Contender(lambda buffer: lambda: wrong(buffer))}
    with pytest.raises(AssertionError, match="broken: wrong sum on rank 0"):
        time_calls(4, FIVE_ROUNDS, TwoRanks(), contenders, "at once")


class Thread:
    """The communicator of one of several threads; only what Streams needs."""

    def __init__(self, rank, everyones, barrier):
        self.rank, self._everyones, self._barrier = rank, everyones, barrier

    def allgather(self, value):
        self._everyones[self.rank] = value
        self._barrier.wait(timeout=20)
        return list(self._everyones)


# Hosts; local ranks; as many bytes as one host has to send.
@pytest.mark.parametrize(
    ("hosts", "ranks", "size_bytes", "sent"),
    [(2, 1, PART_BYTES + 4, PART_BYTES + 4), (2, 2, 4, 4), (4, 1, MIB, 3 * MIB // 2)],
)
def test_every_host_sends_what_an_allreduce_must(hosts, ranks, size_bytes, sent, monkeypatch):
    # In place of the hosts' addresses; what arrives is counted where it is received.
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    everyones, barrier = [None] * hosts * ranks, threading.Barrier(hosts * ranks)

    def rank(number):
        comm = Thread(number, everyones, barrier)
        streams = Streams(comm, number // ranks, hosts, number % ranks)
        streams.bind(torch.ones(size_bytes // 4))()
        streams.close()
        return streams.received_bytes

    with ThreadPoolExecutor(hosts * ranks) as pool:
        received = list(pool.map(rank, range(hosts * ranks)))
    assert received == [sent if number % ranks == 0 else 0 for number in range(hosts * ranks)]


CALLGRIND = """\
positions: line
events: Ir
ob=(1) /lib/core.so
fl=(1) ???
fn=(1) hvdl_post
0 10
+3 5
cob=(2) /usr/bin/python
cfn=(2) malloc
calls=1 0
0 1000
ob=(2)
fn=(2)
0 300
* 200
ob=(1)
fn=(3) hvdl_end
-2 7
totals: 1522
"""


def test_instructions_count_where_they_are_and_not_where_they_are_called_from():
    counts = instructions.by_object(CALLGRIND.splitlines(), "core.so")
    assert counts == {"all": 522, "core": 22}


@pytest.mark.parametrize("kind", ["post", "plan"])
def test_the_program_whose_instructions_are_counted_runs(kind):
    core = ROOT / "hvdlite" / "_core.abi3.so"
    program = ROOT / "benchmarks" / "counted.py"
    for ranks, size_bytes in (("1", "4"), ("2", "4"), ("2", "65536")):
        words = (str(core), ranks, kind, size_bytes, "5")
        finished = run_program([sys.executable, "-S", str(program), *words], limit_s=60)
        assert finished.code == 0, finished


@pytest.mark.parametrize("dtype", passes.DTYPES)
@pytest.mark.parametrize("count", [12, 3 << 18])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_passes_add_up_as_many_inputs_as_there_are_ranks(ranks, count, dtype):
    buffer = (torch.arange(count) % 7).to(dtype)
    chunks = buffer.clone().split(passes.CHUNK_BYTES // buffer.element_size())
    passes.bind(buffer, ranks)()
    for before, after in zip(chunks, buffer.split(chunks[0].numel()), strict=True):
        part = before.numel() // ranks
        own = sum(before[i * part :][:part] for i in range(ranks))
        # The other ranks' parts come back as they were; of two ranks both add up everything.
        expected = 2 * before if ranks == 2 else torch.cat([own, before[part:]])
        assert torch.equal(after, expected)


def run_tiny(output, *options):
    """The report of the command."""
    command = [sys.executable, "-m", "benchmarks", "--plan", "tiny", "--output", str(output)]
    finished = run_program([*command, *options], limit_s=180)
    assert finished.code == 0, finished
    return json.loads((output / "bench.json").read_text()), finished.stdout


@pytest.mark.wide
def test_one_command_measures_and_writes_everything_of_one_host(tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    only = ("allreduce", "types", "tail", "training", "upkeep")
    options = [word for part in only for word in ("--only", part)]
    report, stdout = run_tiny(tmp_path, *options, "--page", str(page))

    upkeep, run = report["runs"]
    assert [row["bytes"] for row in run["allreduce"]] == list(TINY.sizes_bytes)
    for row in run["allreduce"]:
        bounds = {BOUND, PASSES} if row["bytes"] >= passes.LEAST_BYTES else {BOUND}
        assert set(row["median_s"]) == {OURS, "Gloo", run["mpi"], *bounds}
    assert {row["contender"] for row in run["tail"]} == {OURS, "Gloo", run["mpi"]}
    for figure in ("median_s", "passes_s"):
        assert set(run["types"][0][figure]) == {"float32", "float16", "bfloat16"}
    for row in run["training"]:
        assert set(row["median_s"]) == {OURS, DDP, "MPI by hand", FLOOR}
    for once in [once for repetitions in upkeep["upkeep"]["idle"] for once in repetitions]:
        assert once["cpu_s"] >= 0
        assert once["sleeps"] >= 1  # that of the main thread
    for figure in ("idle", "sleeper_cpu_s"):
        assert list(map(len, upkeep["upkeep"][figure])) == [TINY.upkeep_times] * 2
    assert list(map(len, upkeep["upkeep"]["waiting_share"])) == [TINY.upkeep_times]
    for name in ("allreduce.png", "tail.png"):
        assert (tmp_path / name).exists()
        assert f"({name})" in page.read_text()
    assert "Allreduce in place, float32 sum, 2 ranks on one host" in stdout
    assert "### Training step, 2 ranks on one host" in page.read_text()


@pytest.mark.wide
def test_memory_is_read_with_and_without_hvdlite(tmp_path):
    report, stdout = run_tiny(tmp_path, "--only", "memory")
    pss = report["memory"]["pss_bytes"]
    assert {variant: len(values) for variant, values in pss.items()} == {
        "without": 2,
        OURS: 2,
        DDP: 2,
    }
    # A rank holds the parameters and the gradients at least.
    assert min(min(values) for values in pss.values()) > 2 * report["memory"]["buckets_bytes"]
    assert "Memory of a step" in stdout


@pytest.mark.wide
def test_a_divided_update_and_one_copy_per_host_are_measured_beside_their_peers(tmp_path):
    report, stdout = run_tiny(tmp_path, "--only", "sharded", "--only", "copies")
    (run,) = report["runs"]
    (row,) = run["sharded"]
    assert set(row["update_s"]) == {OURS, SHARDED, SHARED}
    assert {*row["update_s"], ZERO, FSDP2, FLOOR} <= set(row["median_s"])
    pss = report["copies"]["pss_bytes"]
    assert {variant: len(values) for variant, values in pss.items()} == VARIANTS
    # Parameters and two averages; a dataset is there once at least.
    assert sum(pss[ALONE]) >= 3 * report["copies"]["gradients_bytes"]
    assert sum(pss[DATASET]) >= report["copies"]["dataset_bytes"]
    assert sum(pss[DATASETS]) >= 4 * report["copies"]["dataset_bytes"]
    for title in ("Steps with a divided update", "Memory of one host"):
        assert title in stdout


@pytest.mark.wide
def test_steps_with_weights_are_measured_beside_those_without(tmp_path):
    report, stdout = run_tiny(tmp_path, "--only", "weighted")
    (run,) = report["runs"]
    (row,) = run["weighted"]
    assert set(row["median_s"]) == {PLAIN, ONES, EQUAL, UNEQUAL}
    assert "Steps with weights" in stdout


@pytest.mark.wide
def test_training_with_a_slow_worker_is_measured_beside_training_that_waits_for_it(tmp_path):
    report, stdout = run_tiny(tmp_path, "--only", "asynchronous")
    found = report["asynchronous"]
    assert found["workers"] == 4
    assert set(found["straggler"]) == {OURS, SYNCHRONOUS, FLOOR}
    assert set(found["loss_s"]) == {OURS, SYNCHRONOUS, SCALED}
    assert set(found["throughput"]) == {OURS, BOUND, FLOOR}
    for title in ("One worker is 5 times slower", "64 MiB of gradients pushed"):
        assert title in stdout


def test_a_star_carries_as_many_bytes_there_as_back(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    Centre(tmp_path / "address")
    rays = [Ray(tmp_path / "address") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda ray: ray.exchange(PART_BYTES + 4), rays))
    assert [ray.received_bytes for ray in rays] == [PART_BYTES + 4] * 2
    for ray in rays:
        ray.close()


@pytest.mark.wide
def test_between_hosts_streams_halves_and_servers_take_part(tmp_path):
    if reason := rig.lacking():
        lacking(reason)
    only = ("rig", "allreduce", "reducescatter", "servers")
    report, stdout = run_tiny(tmp_path, *(word for part in only for word in ("--only", part)))
    assert set(report["servers"]["throughput"]) == {OURS, BOUND}
    assert "64 MiB of gradients pushed, parameters pulled, 4 workers, 1 server" in stdout
    *_, run = report["runs"]  # after those of one host
    assert run["place"] == {"ranks": 1, "hosts": 2, "rate": "1gbit"}
    (row,) = run["allreduce"]
    assert set(row["median_s"]) == set(row["cores"]) == {OURS, "Gloo", run["mpi"], PLAN, BOUND}
    assert all(0 < busy <= 2 * len(os.sched_getaffinity(0)) for busy in row["cores"].values())
    assert "2 hosts with one rank each, 1 Gbit/s" in stdout
    (row,) = run["reducescatter"]
    assert set(row["median_s"]) == set(row["sent_bytes"]) == {*HALVES, *HALVES.values()}
    for half, whole in HALVES.items():
        assert row["sent_bytes"][half] == 0.5 * row["sent_bytes"][whole]


@pytest.mark.wide
def test_an_operation_takes_the_same_instructions_each_time():
    if reason := instructions.lacking():
        lacking(reason)
    core = ROOT / "hvdlite" / "_core.abi3.so"
    first, second = (instructions.counted(core, (2, "post", 4), 20) for _ in range(2))
    assert first["core"] == second["core"]
    assert 0 < first["core"] < first["all"]


@pytest.mark.wide
def test_the_latency_of_each_form_is_measured_and_checked():
    hvdrun = str(Path(sys.executable).with_name("hvdrun"))
    command = [hvdrun, "-np", "2", sys.executable, "-m", "benchmarks.latency", "--quick"]
    finished = run_program(command, limit_s=120)
    assert finished.code == 0, finished
    for form in ("first of its name", "in place", "grouped_allreduce of 100", "mpi4py", "Gloo"):
        assert form in finished.stdout, finished
    assert "of an idle rank, by rank: " in finished.stdout


def test_a_job_that_fails_is_named_and_the_others_run_on(tmp_path):
    def job(folder):
        return Job(Place(2), Flavour(str(folder / "python"), "multiple"), (), ())

    # In place of hvdrun; the one that works writes what the worker would.
    works, fails = tmp_path / "a" / "bin", tmp_path / "b" / "bin"
    for folder, last in ((works, 'echo "{}" >"$output"'), (fails, "exit 7")):
        folder.mkdir(parents=True)
        request = "for request; do :; done"  # the last argument
        output = """output=$(expr "$request" : '.*"output": "\\([^"]*\\)"')"""
        (folder / "hvdrun").write_text(f"#!/bin/sh\n{request}\n{output}\n{last}\n")
        (folder / "hvdrun").chmod(0o755)
    failed = []
    assert run_jobs(TINY, [job(fails), job(works)], failed) == [{}]
    assert failed == ["2 ranks on one host, b (multiple): exit code 7"]
