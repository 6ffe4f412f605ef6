"""examples/mesh.py: layouts differ, results do not."""

import re

import pytest

from tests.distributed.backend import BACKEND
from tests.harness.programs import run_program
from tests.harness.worlds import MPIS, python_of

LAYOUTS = ["one process", "data parallel", "model parallel"]
ARGUMENTS = ["--steps", "4", "--backend", BACKEND]


def check(run, layouts):
    """What it prints with enough digits to show other gradients, and its own verdict."""
    assert run.code == 0, run
    curves = {
        name: re.findall(r"\d\.\d{5}", line)
        for line in run.stdout.splitlines()
        for name in layouts
        if line.startswith(f"  {name} ") and "." in line
    }
    assert list(curves) == layouts, run
    for curve in curves.values():
        assert len(curve) == 4, run
        for found, wanted in zip(curve, curves["one process"], strict=True):
            assert float(found) == pytest.approx(float(wanted), abs=2e-5), run
    assert float(curve[-1]) < float(curve[0]), run


@pytest.mark.wide_in("mpich")
def test_four_ranks_train_in_all_layouts_what_one_process_does(hvdrun, alone, tmp_path):
    file = str(tmp_path / "exported.pt")
    run = hvdrun(4, "mesh.py", *ARGUMENTS, "--export", file)
    check(run, [*LAYOUTS, "both, 2 x 2"])
    assert re.search(
        r"^  0.weight  700x784 as 350x784: batch whole, model dimension 0 in parts$",
        run.stdout,
        re.MULTILINE,
    ), run
    loaded = alone("mesh.py", "--load", file)
    assert loaded.code == 0, loaded
    percent = run.find(r"^Saved .* Test accuracy: (\S+) %$")
    assert loaded.find(r"^Test accuracy of .*: (\S+) %$") == percent


@pytest.mark.wide
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
@pytest.mark.parametrize("starter", ["hvdrun", "torchrun"])
def test_eight_ranks_train_on_rectangles_of_both_forms(hvdrun, tmp_path, starter):
    arguments = [*ARGUMENTS, "--export", str(tmp_path / "exported.pt")]
    if starter == "hvdrun":
        run = hvdrun(8, "mesh.py", *arguments)
    else:
        torchrun = python_of(MPIS[0]).with_name("torchrun")
        command = [torchrun, "--nproc-per-node", "8", "examples/mesh.py", *arguments]
        run = run_program(command, limit_s=120)
    check(run, [*LAYOUTS, "both, 4 x 2", "both, 2 x 4"])
