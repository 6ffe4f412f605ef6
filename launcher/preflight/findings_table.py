"""The findings as a table: a line each."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdrun.preflight.findings import Finding

STYLES = {"failed": "bold red", "warning": "yellow", "ok": "green"}
# In a file or a pipe each finding is one line, however long.
UNBROKEN = 100_000


def table(findings: Iterable[Finding], stream: int = 2) -> str:
    """For the file descriptor `stream`: as wide as its terminal, and in colour if it is one."""
    terminal = os.isatty(stream)
    console = Console(
        force_terminal=terminal,
        no_color=not terminal,
        width=None if terminal else UNBROKEN,
        highlight=False,
    )
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("host", "checked", "", "finding", "what to do"):
        rows.add_column(title, overflow="fold")
    for finding in findings:
        # As Text: rich must not read a host's text as markup.
        verdict = Text(finding.verdict, STYLES[finding.verdict])
        host, what, text, remedy = (
            Text(_plain(words))
            for words in (finding.host, finding.what, finding.text, finding.remedy)
        )
        rows.add_row(host, what, verdict, text, remedy)
    with console.capture() as captured:
        console.print(rows)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def _plain(text: str) -> str:
    """Without control characters, which could change the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
