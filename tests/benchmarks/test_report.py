"""Tables, plot and JSON of made-up figures."""

import io
import json

import pytest
from rich.console import Console

from benchmarks import host, report
from benchmarks.figures import BOUND, FLOOR, OURS

RUN = {
    "ranks": 4,
    "mpi": "Some MPI 1.0",
    "mpi_thread_level": "multiple",
    "allreduce": [
        {"bytes": 4, "median_s": {OURS: 2e-6, "Gloo": 3e-4, "MPI": 1e-6, BOUND: 1e-7}},
        {"bytes": 1 << 20, "median_s": {OURS: 1e-3, "Gloo": 3e-3, "MPI": 2e-3, BOUND: 5e-4}},
    ],
    "training": [
        {"task": "a network", "median_s": {OURS: 0.010, "DDP (Gloo)": 0.015, FLOOR: 0.009}}
    ],
}
REPORT = {"host": {"cpu": "a CPU", "cores": 2, "load_before": 0.1}, "runs": [RUN]}


def cells(line):
    return [cell.strip() for cell in line.strip("│┃").split("│")]


def test_the_tables_show_every_contender_the_bandwidths_and_the_ratio():
    out = io.StringIO()
    report.print_tables(REPORT, Console(file=out, width=120))
    rows = [cells(line) for line in out.getvalue().splitlines() if line.startswith("│")]
    assert rows == [
        ["4 B", "2.0", "300.0", "1.0", "0.1", "0.002", "0.003", "5%", "0.50"],
        ["1 MiB", "1000.0", "3000.0", "2000.0", "500.0", "1.05", "1.57", "50%", "2.00"],
        ["a network", "10.00", "15.00", "9.00", "1.50"],
    ]
    assert "4 ranks, Some MPI 1.0 (threads: multiple)" in out.getvalue()
    assert "cpu a CPU, cores 2" in out.getvalue()


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (3.2, True)])
def test_it_is_said_when_the_machine_was_busy(load, said):
    out = io.StringIO()
    report.print_tables({**REPORT, "host": {"load_before": load}}, Console(file=out, width=120))
    assert ("was busy" in out.getvalue()) == said


def test_the_json_is_the_whole_report(tmp_path):
    report.write_json(REPORT, tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == REPORT


def test_the_plot_is_a_picture(tmp_path):
    report.plot([RUN, {**RUN, "ranks": 2}], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_host_is_described_but_not_named():
    described = host.describe()
    assert all(described[key] for key in ("cpu", "cores", "memory_gib", "kernel", "torch"))
    assert not {"hostname", "node", "user"} & described.keys()
