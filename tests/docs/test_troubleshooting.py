"""The error texts on the troubleshooting page are those of the source."""

import ast
import functools
import re

import pytest

from tests.docs.pages import blocks
from tests.harness.worlds import ROOT

QUOTED = [line for b in blocks("docs/troubleshooting.md", "text") for line in b.text.splitlines()]
# What stands for a value: of C and of logging, and of str.format.
VALUE = re.compile(
    r"%[-+ #0]*[\d*]*(?:\.[\d*]+)?(?:hh|h|ll|l|z|j)?[diouxXeEfgGcsrp]|\{\w+(?::[^}]*)?\}"
)


def with_gaps(text):
    """Values and white space are alike in all texts."""
    return re.sub(r"\s+", " ", re.sub("…+", "…", text))


def python_texts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield VALUE.sub("…", node.value)


def c_texts(path):
    literal = r'"((?:[^"\\\n]|\\.)*)"'
    for run in re.finditer(rf"{literal}(?:\s*{literal})*", path.read_text()):
        yield VALUE.sub("…", "".join(re.findall(literal, run[0])).replace('\\"', '"'))


@functools.cache
def source_texts():
    found = []
    for folder in ("hvdlite", "launcher"):
        for path in (ROOT / folder).rglob("*.py"):
            found += python_texts(path)
        for path in (ROOT / folder).rglob("*.c"):
            found += c_texts(path)
    return [with_gaps(text) for text in found]


@pytest.mark.parametrize("quoted", QUOTED)
def test_an_error_text_of_the_page_stands_in_the_source(quoted):
    assert any(with_gaps(quoted) in text for text in source_texts())


def test_a_text_that_is_not_in_the_source_is_noticed():
    assert len(QUOTED) > 40
    assert not any("an error that nobody raises" in text for text in source_texts())
