"""Whole scripts in the pages, of torch.distributed and frameworks on it, started as users do."""

import importlib.util
import re

import pytest

from tests.distributed.backend import BACKEND
from tests.docs.pages import PAGES, blocks
from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.worlds import python_of

MARK = re.compile(r"a script for 2 ranks(?: with (\w+))?$")
# The last line of each; the ranks have other data, and must have the same parameters.
# Two ranks may print into one line.
RESULT = re.compile(r"2 ranks on (\w+), sum of the parameters (-?\d+\.\d{6})")
STARTERS = {
    "hvdrun": lambda python: [python.with_name("hvdrun"), "-np", "2", python],
    "torchrun": lambda python: [python.with_name("torchrun"), "--standalone", "--nproc-per-node=2"],
    "python": lambda python: [python],  # Lightning starts the other rank itself
}
SCRIPTS = [
    pytest.param(
        *(page, block, mark[1], starter),
        id=f"{page}-{starter}",
        # What torchrun sets up has tests of its own.
        marks=[pytest.mark.wide] if mark[1] or starter == "torchrun" else [],
    )
    for page in PAGES
    for block in blocks(page, "python")
    if (mark := MARK.match(block.mark or ""))
    for starter in STARTERS
    if starter != "python" or mark[1] == "lightning"
]


def test_there_are_pages_with_scripts():
    assert len(SCRIPTS) >= 9


@pytest.mark.parametrize(("page", "script", "package", "starter"), SCRIPTS)
def test_a_script_of_a_page_trains_on_two_ranks(page, script, package, starter, tmp_path):
    if package and importlib.util.find_spec(package) is None:
        lacking(f"{package} is not installed: make test-wide installs it")
    (tmp_path / "train.py").write_text(script.text.replace('"hvdlite"', f'"{BACKEND}"'))
    command = [*STARTERS[starter](python_of("openmpi")), "train.py"]
    run = run_program(command, limit_s=120, cwd=tmp_path)
    assert run.code == 0, run
    found = RESULT.findall(run.stdout)
    assert len(found) == 2, run
    assert found[0] == found[1], run
    assert found[0][0] == BACKEND, run
