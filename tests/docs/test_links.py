"""Links within the project lead somewhere, and the index leads to every page."""

import re
from collections import Counter
from pathlib import Path

import pytest

from docs.generator.pages import DOCS, sections
from tests.docs.pages import PAGES, prose
from tests.harness.worlds import ROOT


def anchors(text):
    """The names that a code host and the site give to headings: lower case, spaces as hyphens,
    without punctuation, numbered where they are equal."""
    found, counted = set(), Counter()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(f"{name}-{counted[name]}" if counted[name] else name)
        counted[name] += 1
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_within_the_project_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        file = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(prose(str(file.relative_to(ROOT)))), link


def test_the_index_leads_to_every_page():
    listed = {page for pages in sections().values() for page in pages}
    # The navigation takes these by their folder.
    design = set((DOCS / "design").glob("*.md"))
    assert {*DOCS.rglob("*.md")} - {DOCS / "README.md"} <= listed | design


# What the pages say there is none of, or that the reader is to make.
NOT_THERE = {"mpi.h", "utils.py", "tests/world/test_first.py"}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.startswith("docs/design/") or page == "CONTRIBUTING.md"]
)
def test_every_file_and_folder_of_the_code_that_a_page_names_exists(page):
    names = set(re.findall(r"`([\w./]+(?:\.(?:c|h|py|pyi)|/))`", PAGES[page])) - NOT_THERE
    missing = {name for name in names if "NAME" not in name and not named(name)}
    assert not missing


def named(name):
    """Whether a file or folder has this name, or a path that ends with it."""
    folders = ("hvdlite", "launcher", "tests", "benchmarks", "docs", "examples", "tools")
    within = (path for folder in folders for path in (ROOT / folder).rglob(Path(name).name))
    ends = tuple(Path(name).parts)
    return (ROOT / name).exists() or any(path.parts[-len(ends) :] == ends for path in within)
