"""The README and the pages of docs/: what they link to exists, and what they show runs."""

import re

import pytest

from tests.harness.programs import run_program
from tests.harness.worlds import ROOT, python_of

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(text):
    """The names that headings get: lower case, spaces as hyphens, without punctuation."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_project_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{page.name} links to {link}"


@pytest.mark.wide_in("mpich")
def test_the_script_in_the_readme_learns_on_two_ranks(mpi, tmp_path):
    (script,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "train.py").write_text(script)
    python = python_of(mpi)
    command = [python.with_name("hvdrun"), "-np", "2", python, tmp_path / "train.py"]
    run = run_program(command, limit_s=120).of_rank(0)
    assert run.code == 0, run
    loss = float(run.find(r"^loss (\S+), averaged over 2 ranks$"))
    assert loss < 1e-3
