"""The folder `black-box` in that of `--output-dir`: after a failure, the ranks' last operations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from hvdrun.machine.own_files import open_file, remove_files

FOLDER = "black-box"
SUMMARY = "summary.txt"
_NAMES = re.compile(r"rank\.[0-9]+\.jsonl|summary\.txt")
_OURS = 2  # the names in a path that hvdrun adds


def write_boxes(
    folder: str, num_proc: int, operations: Mapping[int, Iterable[str]], summary: Iterable[str]
) -> str:
    """DIR/black-box/summary.txt, and rank.N.jsonl for each rank, N with as many digits as the
    highest rank has; empty if nothing is known of the rank. Files of an earlier job, which may
    have had more ranks, are removed. Returns the folder's path. Raises OSError."""
    digits = len(str(num_proc - 1))
    path = os.path.join(folder, FOLDER)
    remove_files(path, _NAMES)
    for rank in range(num_proc):
        _write(os.path.join(path, f"rank.{rank:0{digits}}.jsonl"), operations.get(rank, ()))
    _write(os.path.join(path, SUMMARY), summary)
    return path


def _write(path: str, lines: Iterable[str]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    fd = open_file(path, flags, 0o600, make=True, ours=_OURS)
    with open(fd, "w", encoding="utf-8", errors="replace") as file:
        file.writelines(f"{line}\n" for line in lines)
