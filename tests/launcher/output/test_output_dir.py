"""The folder `black-box` in that of --output-dir."""

import errno
import os

import pytest

from hvdrun.output import output_dir
from hvdrun.output.output_dir import OutputDir


def test_what_an_earlier_job_has_left_there_is_removed_and_nothing_else(tmp_path):
    folder = tmp_path / "black-box"
    OutputDir(str(tmp_path), 12).keep_operations({rank: ["old"] for rank in range(12)}, ["old"])
    (tmp_path / "elsewhere").write_text("mine")
    (folder / "rank.99.jsonl").symlink_to(tmp_path / "elsewhere")
    (folder / "rank.98.jsonl").mkdir()
    for name in ("rank.x.jsonl", "rank.1.jsonl.gz", "notes.txt"):
        (folder / name).write_text("mine")
    line = OutputDir(str(tmp_path), 2).keep_operations({1: ["new"]}, ["all"])
    assert line == f"hvdrun: the ranks' last operations are in {folder}"
    assert {each.name for each in folder.iterdir()} == {
        *("rank.0.jsonl", "rank.1.jsonl", "summary.txt"),
        *("rank.99.jsonl", "rank.98.jsonl", "rank.x.jsonl", "rank.1.jsonl.gz", "notes.txt"),
    }
    assert (folder / "rank.0.jsonl").read_text() == ""
    assert (folder / "rank.1.jsonl").read_text() == "new\n"
    assert (folder / "summary.txt").read_text() == "all\n"
    assert (tmp_path / "elsewhere").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_in_a_folder_that_is_another_users_symlink_nothing_is_removed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "summary.txt").write_text("mine")
    trap = tmp_path / "black-box"
    trap.symlink_to(elsewhere)
    os.chown(trap, 4321, 4321, follow_symlinks=False)
    assert "this symlink" in OutputDir(str(tmp_path), 2).keep_operations({}, [])
    assert (elsewhere / "summary.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EACCES, "Permission denied", "/a"), "Permission denied (/a)"),
        (OSError("it is strange"), "it is strange"),
    ],
)
def test_why_there_are_no_files_is_said(monkeypatch, tmp_path, error, why):
    def fail(*_):
        raise error

    there = OutputDir(str(tmp_path), 2)
    monkeypatch.setattr(output_dir, "_write", fail)
    line = there.keep_operations({}, [])
    assert line == f"hvdrun: the ranks' last operations are not in --output-dir: {why}"
    assert there.keep_metrics("{}") == f"hvdrun: --output-dir has no metrics.json: {why}"
