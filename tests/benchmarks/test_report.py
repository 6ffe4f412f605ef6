"""Tables, plots and the page, of made-up figures."""

import io

import pytest
from rich.console import Console

from benchmarks import host, plots, report
from benchmarks.figures import (
    ALONE,
    BOUND,
    DATASET,
    DDP,
    EQUAL,
    FLOOR,
    FREED,
    FSDP2,
    ONES,
    OURS,
    PLAIN,
    SCALED,
    SHARDED,
    SHARED,
    SYNCHRONOUS,
    UNEQUAL,
    ZERO,
)
from benchmarks.tables import tables
from benchmarks.targets import verdicts

PERCENTILES_S = [1e-6, 2e-6, 3e-6, 4e-6, 5e-3]
RUN = {
    "place": {"ranks": 4, "hosts": 1, "rate": ""},
    "mpi": "Some MPI",
    "allreduce": [
        {
            "bytes": 4,
            "median_s": {OURS: 2e-6, "Gloo": 3e-4, "Some MPI": 1e-6, BOUND: 1e-7},
            "rounds": 9,
        },
        {
            "bytes": 1 << 20,
            "median_s": {OURS: 1e-3, "Gloo": 3e-3, "Some MPI": 2e-3, BOUND: 5e-4},
            "rounds": 8,
        },
    ],
    "types": [
        {
            "elements": 1024,
            "median_s": {"float32": 2e-6, "float16": 1e-6, "bfloat16": 4e-6},
            "passes_s": {"float32": 1e-6, "float16": 8e-7, "bfloat16": 5e-7},
        }
    ],
    "training": [
        {"task": "mlp", "title": "a network", "median_s": {OURS: 0.01, DDP: 0.0118, FLOOR: 0.009}}
    ],
    "tail": [
        {
            "bytes": 4,
            "situation": "one late",
            "contender": OURS,
            "calls": 1000,
            "percentiles_s": PERCENTILES_S,
            "histogram": [[1e-6, 999], [5e-3, 1]],
        }
    ],
    "sharded": [
        {
            "title": "a network",
            "update_s": {OURS: 1e-3, SHARDED: 6e-4, SHARED: 5e-4},
            "median_s": {OURS: 3e-3, SHARDED: 2e-3, SHARED: 2e-3, ZERO: 6e-3, FSDP2: 6e-3},
        }
    ],
    "weighted": [
        {
            "title": "a network",
            "median_s": {PLAIN: 4e-3, ONES: 4e-3, EQUAL: 4.02e-3, UNEQUAL: 4.1e-3},
            "rounds": 9,
        }
    ],
    "upkeep": {
        "idle_for_s": 10.0,
        "idle": [
            [{"cpu_s": 1e-4, "sleeps": 9}],
            [{"cpu_s": 2e-4, "sleeps": 11}],
        ],
        "sleeper_cpu_s": [[1e-4], [3e-4]],
        "waiting_share": [[0.01]],
    },
}
HOSTS = {**RUN, "place": {"ranks": 1, "hosts": 2, "rate": "1gbit"}}
MIB = 1 << 20
REPORT = {
    "host": {"cpu": "a CPU", "cores": 2, "load_before": 0.1},
    "not_measured": [],
    "failed": [],
    "runs": [RUN],
    "memory": {
        "buckets_bytes": 10 * MIB,
        "pss_bytes": {"without": [100 * MIB, 90 * MIB], OURS: [105 * MIB, 110 * MIB]},
    },
    "copies": {
        "gradients_bytes": MIB,
        "dataset_bytes": 8 * MIB,
        "pss_bytes": {ALONE: [3 * MIB], FREED: [1 * MIB, 2 * MIB], DATASET: [4 * MIB, 5 * MIB]},
    },
    "asynchronous": {
        "workers": 4,
        "bytes": 64 * MIB,
        "straggler": {FLOOR: 140.0, SYNCHRONOUS: 40.0, OURS: 130.0},
        "loss": 0.5,
        "loss_s": {SYNCHRONOUS: 9.0, SCALED: 4.0, OURS: 3.0},
        "throughput": {BOUND: [200.0], FLOOR: [150.0], OURS: [130.0, 100.0, 110.0]},
    },
    "servers": {
        "workers": 4,
        "bytes": 64 * MIB,
        "rate": "1gbit",
        "throughput": {BOUND: [1.75], OURS: [1.5]},
    },
    "instructions": [{"operation": "post", "core": 1000.0, "all": 1234.4}],
}


def shown(found):
    return tables(found, verdicts(found))


def rows_of(title):
    (table,) = [table for table in shown(REPORT) if table.title.startswith(title)]
    return [list(row) for row in table.rows]


def test_the_table_of_an_allreduce_shows_every_contender_the_bound_and_the_ratio():
    assert rows_of("Allreduce in place, float32 sum, 4 ranks on one host") == [
        [
            "4 B",
            "2.00 µs",
            "300 µs",
            "1.00 µs",
            "0.100 µs",
            "0.0400 GB/s",
            "0.00300",
            "5%",
            "0.500",
            "9",
        ],
        [
            "1 MiB",
            "1.00 ms",
            "3.00 ms",
            "2.00 ms",
            "500 µs",
            "2.10 GB/s",
            "1.57",
            "50%",
            "2.00",
            "8",
        ],
    ]


def test_between_hosts_the_goodput_is_that_of_each_direction():
    row = {"bytes": 10**6, "median_s": {OURS: 0.02, "MPI": 0.03, BOUND: 0.012}, "rounds": 1}
    place = {"ranks": 2, "hosts": 4, "rate": "1gbit"}
    found = {"runs": [{"place": place, "mpi": "MPI", "allreduce": [row]}]}
    (table,) = [table for table in shown(found) if table.title.startswith("Allreduce")]
    assert table.columns[4] == "speed of streams"
    assert table.rows[0][4] == "1.00 Gbit/s"  # 2·(4-1)/4 · 1 MB in 12 ms


@pytest.mark.parametrize(
    ("title", "row"),
    [
        (
            "hvdlite's allreduce by type",
            [
                *("1024", "2.00 µs", "1.00 µs", "4.00 µs", "1.00 µs", "0.800 µs", "0.500 µs"),
                *("2.00", "0.500", "1.25", "2.00"),
            ],
        ),
        (
            "Training step",
            ["a network", "10.0 ms", "11.8 ms", "9.00 ms", "10.0 ms", "10.0%", "1.18"],
        ),
        (
            "Single allreduces",
            [
                "4 B, one late",
                OURS,
                *("1.00 µs", "2.00 µs", "3.00 µs", "4.00 µs", "5.00 ms"),
                "1000",
            ],
        ),
        (
            "Ranks that do nothing",
            [
                "4 ranks on one host, Some MPI",
                "200 µs",
                "200 µs",
                "11",
                "300 µs",
                "300 µs",
                "1.00%",
            ],
        ),
        ("Instructions", ["post", "1000", "1234"]),
    ],
)
def test_every_part_has_a_table(title, row):
    assert rows_of(title) == [row]


def test_memory_is_shown_above_that_of_the_step_without():
    assert rows_of("Memory of a step") == [
        ["without", "100", "0", "0"],
        [OURS, "110", "10.0", "1.00"],
    ]


def test_steps_with_a_divided_update_are_shown_beside_the_unsharded_one():
    assert rows_of("Steps with a divided update, a network, 4 ranks on one host, Some MPI") == [
        [OURS, "3.00 ms", "1.00 ms", "1.00"],
        [SHARDED, "2.00 ms", "600 µs", "1.50"],
        [SHARED, "2.00 ms", "500 µs", "1.50"],
        [ZERO, "6.00 ms", "–", "0.500"],
        [FSDP2, "6.00 ms", "–", "0.500"],
    ]


def test_steps_with_weights_are_shown_beside_those_without():
    assert rows_of("Steps with weights, a network, 4 ranks on one host, Some MPI") == [
        [PLAIN, "4.00 ms", "+0.00 %"],
        [ONES, "4.00 ms", "+0.00 %"],
        [EQUAL, "4.02 ms", "+0.50 %"],
        [UNEQUAL, "4.10 ms", "+2.50 %"],
    ]


def test_what_a_host_has_once_is_shown_in_copies():
    assert rows_of("Memory of one host") == [
        [ALONE, "3.00", "3.00", "1.00"],
        [f"{FREED}, 2 ranks", "3.00", "3.00", "1.00"],
        [f"{DATASET}, 2 ranks", "9.00", "9.00", "1.12"],
    ]


def test_training_with_a_server_is_shown_beside_its_peers():
    assert rows_of("One worker is 5 times slower") == [
        ["each for itself", "140", "–"],
        [SYNCHRONOUS, "40.0", "9.00 s"],
        [SCALED, "–", "4.00 s"],
        ["AsyncOptimizer", "130", "3.00 s"],
    ]
    pushed = "64 MiB of gradients pushed, parameters pulled, 4 workers"
    assert rows_of(f"{pushed} and 1 server on one host") == [
        ["only copied", "200", "13.4"],
        ["copied, and updated by each", "150", "10.1"],
        ["AsyncOptimizer", "110", "7.38"],
    ]
    assert rows_of(f"{pushed}, 1 server on another host, 1 Gbit/s") == [
        ["plain TCP streams", "1.75", "0.117"],
        ["AsyncOptimizer", "1.50", "0.101"],
    ]


def test_targets_are_said_to_be_met_missed_or_not_measured():
    said = {row[3] for row in rows_of("Targets")}
    assert said == {"met", "missed", "–"}


def printed(found):
    out = io.StringIO()
    report.print_report(found, shown(found), Console(file=out, width=150))
    return out.getvalue()


def test_the_terminal_shows_all_tables():
    text = printed(REPORT)
    assert "cpu a CPU, cores 2" in text
    for table in shown(REPORT):
        assert table.title.split(",")[0] in text


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (3.2, True)])
def test_it_is_said_when_the_machine_was_busy(load, said):
    busy = {**REPORT, "host": {"load_before": load}}
    assert ("was busy" in printed(busy)) == said


def test_it_is_said_what_could_not_be_measured():
    text = printed({**REPORT, "not_measured": ["no root"], "failed": ["2 ranks: exit code 1"]})
    assert "Not measured: no root." in text
    assert "Failed: 2 ranks: exit code 1." in text


def test_the_page_gets_the_tables_between_its_marks_and_keeps_the_rest():
    text = report.markdown(REPORT, shown(REPORT), ["pictures/allreduce.png"])
    page = report.replace_measured(f"# Title\n{report.BEGIN}\nold\n{report.END}\nthe end\n", text)
    assert page.startswith("# Title\n")
    assert page.endswith("the end\n")
    assert "old" not in page
    assert "| size | hvdlite | Gloo | Some MPI | copy | speed of copy | busbw |" in page
    assert "| 1 MiB | 1.00 ms | 3.00 ms | 2.00 ms | 500 µs | 2.10 GB/s | 1.57 | 50% |" in page
    assert "![allreduce](pictures/allreduce.png)" in page
    assert report.replace_measured(page, text) == page


def test_a_page_without_marks_is_left_alone():
    with pytest.raises(ValueError, match="has no line"):
        report.replace_measured("# Title\n", "figures")


def test_the_plots_are_pictures(tmp_path):
    files = plots.draw({**REPORT, "runs": [RUN, HOSTS]}, tmp_path)
    assert [file.name for file in files] == ["allreduce.png", "hosts.png", "tail.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_host_is_described_but_not_named():
    described = host.describe()
    assert all(described[key] for key in ("cpu", "cores", "memory_gib", "kernel", "torch"))
    assert not {"hostname", "node", "user"} & described.keys()
