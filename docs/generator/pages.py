"""Copies the pages to a folder that Sphinx reads: links made to fit, tables and docstrings put in.

The order of the site's navigation is that of the links in docs/README.md, a part for each of its
headings.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docs.generator import reference, tables

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
FIRST_PAGE = DOCS / "quickstart.md"
EXAMPLES = ROOT / "examples"

LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
TABLE_MARK = re.compile(r"^<!-- table: ([a-z ]+) -->\n.*?^<!-- end -->\n", re.MULTILINE | re.DOTALL)
PLAIN_MARK = re.compile(r"^<!-- not in the site -->\n.*?^<!-- end -->\n", re.MULTILINE | re.DOTALL)
DOCSTRINGS_MARK = "<!-- docstrings -->\n"
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def stage(target: Path) -> None:
    """Makes the folder anew."""
    shutil.rmtree(target, ignore_errors=True)
    names = _names()
    for source, name in names.items():
        if source == INDEX or source == ROOT / "README.md":
            continue  # the navigation has what they say
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_Page(source, name, names, target).text())


def sections() -> dict[str, list[Path]]:
    """The pages that docs/README.md links to, by its headings; each once."""
    found: dict[str, list[Path]] = {}
    seen: set[Path] = set()
    for part in INDEX.read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        links = [link.partition("#")[0] for link in LINK.findall(body) if "://" not in link]
        pages = dict.fromkeys((DOCS / link).resolve() for link in links)
        found[title] = [page for page in pages if page not in seen]
        seen.update(pages)
    return found


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with what is not inside fences changed."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


@dataclass(frozen=True)
class _Page:
    source: Path
    name: str  # in the site
    names: dict[Path, str]
    target: Path

    def text(self) -> str:
        if self.source == EXAMPLES:
            return _list_of_examples()
        if self.source.suffix == ".py":
            return _example(self.source)
        text = outside_code(_filled(self.source.read_text()), self._linked)
        return text + _navigation(self.names) if self.source == FIRST_PAGE else text

    def _linked(self, text: str) -> str:
        """With links that lead to the same thing in the site; other files are copied there."""
        return LINK.sub(self._link, text)

    def _link(self, match: re.Match[str]) -> str:
        link, hash_, anchor = match[1].partition("#")
        if not link or "://" in match[1] or link.startswith("mailto:"):
            return match[1]
        file = (self.source.parent / link).resolve()
        name = self.names.get(file)
        if name is None:
            if not file.is_file():
                raise SystemExit(f"{self.source}: {link} is not there")
            name = f"files/{file.relative_to(ROOT)}"
            (self.target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, self.target / name)
        return os.path.relpath(name, Path(self.name).parent) + hash_ + anchor


def _names() -> dict[Path, str]:
    """What the site calls each file that is a page of it."""
    pages = {page: str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))}
    return {
        **pages,
        **{example: f"examples/{example.stem}.md" for example in _examples()},
        EXAMPLES: "examples/index.md",
        ROOT / "CHANGELOG.md": "changelog.md",
        ROOT / "CONTRIBUTING.md": "contributing.md",
        **dict.fromkeys((FIRST_PAGE, INDEX, ROOT / "README.md"), "index.md"),
    }


def _examples() -> list[Path]:
    return sorted(EXAMPLES.glob("*.py"))


def _list_of_examples() -> str:
    listed = "\n".join(path.stem for path in _examples())
    return f"# Examples\n\n```{{toctree}}\n{listed}\n```\n"


def _example(source: Path) -> str:
    """A page with the file, under the first line of its docstring."""
    code = source.read_text()
    first = (ast.get_docstring(ast.parse(code)) or source.name).splitlines()[0].rstrip(".")
    return f"# {source.name}\n\n{first}.\n\n```python\n{code}```\n"


def _filled(text: str) -> str:
    """With the tables and docstrings in place of their marks."""
    text = PLAIN_MARK.sub("", text)
    text = TABLE_MARK.sub(lambda mark: tables.TABLES[mark[1]]() + "\n", text)
    *parts, rest = text.split(DOCSTRINGS_MARK)
    filled = [part + reference.directives(reference.names_in(part)) + "\n" for part in parts]
    return "".join([*filled, rest])


def _navigation(names: dict[Path, str]) -> str:
    """The trees of contents, which the site shows beside each page."""
    parts = []
    for title, pages in sections().items():
        listed = [names[page] for page in pages]
        if any(name.startswith("design/") for name in listed):
            # The map of the design first, and last what the index does not mention.
            every = sorted(name for name in names.values() if name.startswith("design/"))
            listed = [*(name for name in every if name == "design/README.md"), *listed, *every]
        titled = ("Quick start <self>" if name == "index.md" else name for name in listed)
        tree = "\n".join(dict.fromkeys(titled))
        parts.append(f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{tree}\n```\n")
    return "".join(parts)
