"""The Python code of the pages: all of it compiles, and what is marked so runs on two ranks."""

import pytest

from tests.docs.pages import PAGES, blocks, within
from tests.harness.uncounted import uncounted

RUNS = "runs on 2 ranks"
WITH_CODE = [page for page in PAGES if blocks(page, "python")]
RUNNABLE = [page for page in WITH_CODE if any(b.mark == RUNS for b in blocks(page, "python"))]


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_python_code_of_a_page_compiles(page):
    for number, block in enumerate(blocks(page, "python"), 1):
        compile(block.text, f"{page}, block {number}", "exec")


@uncounted()
def run_in_order(page, folder):
    """The marked blocks of a page are one program."""
    program = {"__name__": "page"}
    with within(folder):
        for number, block in enumerate(blocks(page, "python"), 1):
            if block.mark == RUNS:
                exec(compile(block.text, f"{page}, block {number}", "exec"), program)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("page", RUNNABLE)
def test_the_python_code_of_a_page_runs(world, page, tmp_path):
    world.run(run_in_order, page, tmp_path)
