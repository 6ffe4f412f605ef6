"""When a target counts as met."""

import pytest

from benchmarks.figures import (
    ALLREDUCE,
    ALONE,
    ANY_CORE,
    BOUND,
    DATASET,
    DDP,
    EQUAL,
    FLOOR,
    FREED,
    FSDP2,
    GLOO,
    IDLE,
    ONES,
    OPTIMIZER,
    OURS,
    PLAIN,
    REDUCESCATTER,
    SCALED,
    SHARDED,
    SHARED,
    SYNCHRONOUS,
    TO_OWNERS,
    UNEQUAL,
    WHOLE_PLAN,
    ZERO,
)
from benchmarks.plan import MIB
from benchmarks.targets import horovod_s, verdicts


def run(size_bytes, mpi_s, ranks=2, gloo_s=1000.0, bound_s=0.5, **elsewhere):
    """hvdlite takes one second."""
    median_s = {OURS: 1.0, "Gloo": gloo_s, "MPI": mpi_s, BOUND: bound_s}
    rows = [{"bytes": size_bytes, "median_s": median_s, "rounds": 3}]
    return {"place": {"ranks": ranks, **elsewhere}, "mpi": "MPI", "allreduce": rows}


def found(*runs, **rest):
    """What is said of each kind of work, without what was not measured."""
    said = [v for v in verdicts({"runs": runs, **rest}) if v.met is not None]
    return {(v.work, v.target): (v.found, v.met) for v in said}


def test_what_was_not_measured_is_neither_met_nor_missed():
    assert {v.met for v in verdicts({"runs": []})} == {None}
    assert found() == {}


@pytest.mark.parametrize(("mpi_s", "met"), [(2.49, False), (2.5, True)])
def test_the_best_peer_decides(mpi_s, met):
    said = found(run(64 * MIB, mpi_s, bound_s=0.81))
    large = "2 ranks, 64 and 256 MiB"
    assert said == {
        (large, "≥ 2.5× as fast as the best peer"): (f"{mpi_s:.2f}× (64 MiB)", met),
        (large, "≥ 80 % of the copy bound"): ("81.0 % (64 MiB)", True),
    }


def test_the_worst_size_decides_and_is_named():
    said = found(run(1 * MIB, 1.6), run(4 * MIB, 1.4), run(16 * MIB, 1.5))
    assert list(said.values()) == [("1.40× (4 MiB)", False)]


@pytest.mark.parametrize(("mpi_s", "gloo_s", "met"), [(0.25, 20, True), (0.24, 19.9, False)])
def test_tiny_sizes_are_compared_with_gloo_and_with_mpi4py(mpi_s, gloo_s, met):
    said = found(run(4096, mpi_s, gloo_s=gloo_s))
    assert [verdict for _, verdict in said.values()] == [met, met]


@pytest.mark.parametrize(
    ("size_bytes", "limit"),
    [(4, 1), (64 << 10, 1), (256 << 10, 1.4), (4 * MIB, 1.4), (16 * MIB, 2), (64 * MIB, 3)],
)
def test_four_ranks_have_a_target_for_every_size(size_bytes, limit):
    def met(mpi_s):
        ((_, verdict),) = found(run(size_bytes, mpi_s, ranks=4)).values()
        return verdict

    assert met(limit)
    assert not met(limit - 0.01)


def test_eight_ranks_may_nowhere_be_slower():
    said = found(run(4, 0.9, ranks=8), run(MIB, 5, ranks=8))
    assert said == {
        ("8 ranks, all sizes", "≥ 1× as fast as the best peer"): ("0.900× (4 B)", False)
    }


def test_between_hosts_the_wire_counts():
    there = {"ranks": 2, "hosts": 4, "rate": "1gbit"}
    said = found(run(16 * MIB, 1.3, bound_s=0.94, **there))
    where = "(4 hosts with 2 ranks each, 1 Gbit/s, 16 MiB)"
    assert list(said.values()) == [(f"94.0 % {where}", False), (f"1.30× {where}", True)]
    assert found(run(MIB, 1.0, **there)) == {}


@pytest.mark.parametrize(("of_whole", "met"), [(0.55, [True, True]), (0.66, [False, False])])
def test_a_reducescatter_is_compared_with_the_allreduce_in_bytes_and_in_time(of_whole, met):
    def beside(share):
        return {ALLREDUCE: 2.0, REDUCESCATTER: 2 * share, WHOLE_PLAN: 8.0, TO_OWNERS: 8 * of_whole}

    row = {"bytes": MIB, "median_s": beside(0.5), "sent_bytes": beside(0.5), "rounds": 3}
    place = {"ranks": 1, "hosts": 4, "rate": "1gbit"}
    said = found({"place": place, "mpi": "MPI", "reducescatter": [row]})
    where = "(4 hosts with one rank each, 1 Gbit/s, 1 MiB)"
    assert list(said.values()) == [(f"{of_whole:.3f}× {where}", verdict) for verdict in met]


def test_on_two_hosts_without_limits_the_target_changes_at_64_kib():
    there = {"ranks": 1, "hosts": 2}
    large, small = found(run(64 << 10, 0.9, **there)), found(run(4096, 0.9, **there))
    assert [met for _, met in large.values()] == [False]
    assert [met for _, met in small.values()] == [True, True]
    assert found(run(64 << 10, 0.9, ranks=1, hosts=4)) == {}


@pytest.mark.parametrize(("bfloat16_s", "met"), [(0.5, True), (0.6, False)])
def test_16_bits_are_compared_at_equal_numbers_of_elements(bfloat16_s, met):
    median_s = {"float32": 1.0, "float16": 0.5, "bfloat16": bfloat16_s}
    said = found({"place": {"ranks": 2}, "types": [{"elements": 1 << 18, "median_s": median_s}]})
    assert [verdict for _, verdict in said.values()] == [True, met]


def step(task, **medians_s):
    row = {"task": task, "title": "a step", "median_s": {**medians_s}}
    return {"place": {"ranks": 2}, "training": [row]}


def test_horovods_step_is_derived_from_ddps_by_the_better_of_its_ratios():
    assert horovod_s("mlp", {DDP: 11.8}) == pytest.approx(10.0)
    assert horovod_s("deep", {DDP: 128.0}) == pytest.approx(100.0)
    assert horovod_s("resnet", {DDP: 1.0}) is None


@pytest.mark.parametrize(("ours_s", "met"), [(1.0, [True, True]), (1.1, [False, False])])
def test_a_step_is_compared_with_ddps_and_with_horovods(ours_s, met):
    said = found(step("deep", **{OURS: ours_s, DDP: 1.3, FLOOR: 0.9}))
    assert [verdict for _, verdict in said.values()] == met


def test_it_is_said_by_how_much_a_step_could_be_faster_at_best():
    said = found(step("resnet", **{OURS: 1.0, DDP: 1.2, FLOOR: 0.96}))
    speedup = said["step: a step", "≥ 1.3× as fast as DDP with Gloo"]
    assert speedup == ("1.20× (without communication 1.25×)", False)


@pytest.mark.parametrize(("floor_s", "met"), [(0.9, True), (0.89, False)])
def test_what_the_resnet_does_not_hide_counts(floor_s, met):
    said = found(step("resnet", **{OURS: 1.0, DDP: 2.0, FLOOR: floor_s}))
    assert said["step: a step", "≤ 10 % of the step not hidden"][1] == met


@pytest.mark.parametrize(("ours_s", "met"), [(1.29, True), (1.31, False)])
def test_what_tiny_parameters_cost_is_compared_with_ddps(ours_s, met):
    said = found(step("tiny", **{OURS: ours_s * 0.8, DDP: 1.6, FLOOR: 0.8}))
    (cost,) = [verdict for (_, target), verdict in said.items() if target.startswith("≤ 0.3× ")]
    assert cost[1] == met


def operation(name, size_bytes, ranks=2, **medians_s):
    row = {"operation": name, "bytes": size_bytes, "median_s": {OURS: 1.0, GLOO: 9.0, **medians_s}}
    return {"place": {"ranks": ranks}, "c10d": [row]}


def test_an_operation_is_compared_with_the_better_of_gloos_bindings():
    in_time = operation("reduce_scatter_tensor", MIB, **{ANY_CORE: 7.0})
    late = operation("reduce_scatter_tensor", MIB, **{ANY_CORE: 6.9})
    work = ("reduce_scatter_tensor, 2 ranks, 64 KiB to 64 MiB", "≥ 7× as fast as Gloo")
    assert found(in_time) == {work: ("7.00× (1 MiB)", True)}
    assert found(late, in_time) == {work: ("6.90× (1 MiB)", False)}


@pytest.mark.parametrize(("size_bytes", "said"), [(MIB, [True]), (16 * MIB, [True, False])])
def test_a_large_allgather_is_compared_with_a_copy_too(size_bytes, said):
    row = operation("all_gather_into_tensor", size_bytes, **{BOUND: 0.69})
    assert [met for _, met in found(row).values()] == said


@pytest.mark.parametrize(("ours_s", "met"), [(20e-6, True), (21e-6, False)])
def test_a_tiny_allreduce_has_a_limit_in_microseconds(ours_s, met):
    ((_, said),) = found(operation("all_reduce", 16, **{OURS: ours_s})).values()
    assert said == met


def wrapped(wrapper, ranks=2, hosts=1, rate="", task="mlp", **medians_s):
    row = {"wrapper": wrapper, "task": task, "title": "a step", "median_s": medians_s}
    return {"place": {"ranks": ranks, "hosts": hosts, "rate": rate}, "wrapped": [row]}


@pytest.mark.parametrize(("optimizer_s", "near"), [(0.96, True), (0.95, False)])
def test_a_ddp_step_is_compared_with_gloos_and_with_our_optimizer(optimizer_s, near):
    medians_s = {OURS: 1.0, GLOO: 1.5, IDLE: 0.75, OPTIMIZER: optimizer_s}
    speed, more = found(wrapped("DDP", **medians_s)).values()
    assert speed == ("1.50× (a group that does nothing 2.00×)", True)
    assert more[1] == near


@pytest.mark.parametrize(
    ("where", "limit"),
    [((2,), 2.3), ((4,), 1.3), ((1, 2, "1gbit"), 1.1)],
)
def test_a_step_of_fsdp2_has_a_target_for_each_place(where, limit):
    def met(gloo_s):
        run = wrapped("FSDP2", *where, **{OURS: 1.0, GLOO: gloo_s, IDLE: 0.5})
        ((_, verdict),) = found(run).values()
        return verdict

    assert met(limit)
    assert not met(limit - 0.01)


def test_the_median_of_the_worst_rank_decides_what_idling_and_waiting_cost():
    idle = [
        [{"cpu_s": cpu_s} for cpu_s in rank] for rank in ([1e-4, 9e-4, 1e-4], [2e-4, 6e-4, 7e-4])
    ]
    waiting = [[0.02, 0.02, 0.09], [0.05, 0.01, 0.06]]
    upkeep = {"idle_for_s": 5.0, "idle": idle, "waiting_share": waiting}
    said = found({"place": {"ranks": 2}, "mpi": "MPI", "upkeep": upkeep})
    assert [met for _, met in said.values()] == [False, True]


@pytest.mark.parametrize(("mib", "met"), [(180, True), (181, False)])
def test_memory_may_be_one_set_of_buckets_and_32_mib_above_the_step_without(mib, met):
    pss = {"without": [90 * MIB, 100 * MIB], OURS: [mib * MIB, 150 * MIB]}
    ((_, verdict),) = found(memory={"buckets_bytes": 48 * MIB, "pss_bytes": pss}).values()
    assert verdict == met


def divided(way, update, step, **medians_s):
    both = {SHARDED: 0.1, SHARED: 0.1}
    row = {
        "title": "a step",
        "update_s": {**both, way: update, OURS: 1.0},
        "median_s": {**both, way: step, **medians_s},
    }
    return {"place": {"ranks": 2}, "sharded": [row]}


@pytest.mark.parametrize(("way", "said"), [(SHARDED, "ordinary"), (SHARED, "shared")])
def test_a_divided_update_is_compared_with_the_whole_one_and_with_torchs_ways(way, said):
    medians_s = {OURS: 1.15, ZERO: 2.5, f"{ZERO}, any core": 2.0, FSDP2: 2.0}

    def of_way(*times_s):
        verdicts_of_all = found(divided(way, *times_s, **medians_s))
        return [v for (work, _), v in verdicts_of_all.items() if f"{said} parameters" in work]

    assert of_way(0.6, 1.0) == [
        (f"{figure}× (2 ranks)", True) for figure in ("0.600", "2.00", "2.00", "1.15")
    ]
    assert [met for _, met in of_way(0.61, 1.01)] == [False] * 4


@pytest.mark.parametrize(("ms", "met"), [(4.03, True), (4.05, False)])
def test_the_dearest_weights_decide_what_weights_cost(ms, met):
    row = {"title": "a step", "median_s": {PLAIN: 4.0, ONES: 3.9, EQUAL: ms, UNEQUAL: 4.0}}
    ((said, verdict),) = found({"place": {"ranks": 2}, "weighted": [row]}).values()
    assert verdict == met
    assert said.endswith(f"({EQUAL})")


@pytest.mark.parametrize(("extra", "met"), [(0, True), (4, False)])
def test_what_a_host_has_once_counts_over_all_ranks(extra, met):
    of_ranks = [98 * MIB + extra * MIB] * 4
    pss = {ALONE: [304 * MIB], FREED: of_ranks, DATASET: [(52 + extra) * MIB] * 4}
    measured = {"gradients_bytes": 100 * MIB, "dataset_bytes": 200 * MIB, "pss_bytes": pss}
    assert [verdict for _, verdict in found(copies=measured).values()] == [met, met]


@pytest.mark.parametrize(("ours", "met"), [(90.0, True), (89.0, False)])
def test_training_that_does_not_wait_is_compared_with_each_worker_for_itself(ours, met):
    measured = {
        "straggler": {OURS: ours, FLOOR: 100.0},
        "loss": 0.5,
        "loss_s": {SYNCHRONOUS: 3.0, SCALED: 1.0, OURS: ours / 90},
        "throughput": {OURS: [1.0, ours / 3, 90.0], BOUND: [1.0, 50.0, 60.0]},
    }
    said = found(asynchronous=measured, servers={"throughput": measured["throughput"]})
    assert list(said.values()) == [
        (f"{ours / 100:.3f}× (4 workers)", met),
        (f"{90 / ours:.2f}× (loss 0.5)", True),
        (f"{ours / 1.5:.1f} % (64 MiB)", met),
        (f"{ours / 1.5:.1f} % (64 MiB)", met),
    ]


def test_a_loss_that_is_reached_later_than_by_the_better_way_to_wait_is_missed():
    measured = {
        "straggler": {OURS: 1.0, FLOOR: 1.0},
        "loss": 0.5,
        "loss_s": {SYNCHRONOUS: 3.0, SCALED: 1.0, OURS: 2.0},
        "throughput": {OURS: [1.0], BOUND: [1.0]},
    }
    assert ("0.500× (loss 0.5)", False) in found(asynchronous=measured).values()
