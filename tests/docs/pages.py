"""What stands in the pages."""

import contextlib
import os
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from tests.harness.worlds import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
}
# A fence, also within a list, and a comment before it, if there is one.
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    text: str
    mark: str | None


def blocks(page, language):
    return [
        Block(textwrap.dedent(found["text"]), found["mark"])
        for found in FENCE.finditer(PAGES[page])
        if found["language"] == language
    ]


def prose(page):
    """The page without what is inside fences."""
    return FENCE.sub("", PAGES[page])


def commands(page):
    """What stands behind a prompt, in fences or indented."""
    return re.findall(r"^ *\$ (.*?)(?:  +#.*)?$", PAGES[page], re.MULTILINE)


@contextlib.contextmanager
def within(folder):
    """The working directory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
