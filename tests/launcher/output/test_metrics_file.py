"""The file of --metrics-file: a reader sees the old content or the new one."""

import os
import stat
import threading

import pytest

from hvdrun.errors import UsageError
from hvdrun.output import metrics_file
from hvdrun.output.metrics_file import MetricsFile


def contents(running, ended):
    return lambda is_running: running() if is_running else ended


def test_it_is_written_while_the_job_runs_and_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "EVERY_S", 0.001)
    path = tmp_path / "job.prom"
    seen, enough = [], threading.Event()

    def running():
        seen.append(path.read_text() if path.exists() else "")
        if len(seen) == 3:
            enough.set()
        return f"{len(seen)}\n"

    file = MetricsFile(str(path), contents(running, "end\n"))
    file.begin()
    assert enough.wait(60)
    file.end()
    assert seen[:3] == ["", "1\n", "2\n"]
    assert path.read_text() == "end\n"
    assert os.listdir(tmp_path) == ["job.prom"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert not file.thread.is_alive()


def test_what_goes_wrong_is_said_once_and_the_job_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "EVERY_S", 0.001)
    folder = tmp_path / "folder"
    failed, enough = [], threading.Event()

    def running():
        failed.append(file.failure)
        if len(failed) == 3:
            enough.set()
        return "x\n"

    file = MetricsFile(str(folder / "job.prom"), contents(running, "end\n"))
    file.begin()
    assert enough.wait(60)
    line = f"hvdrun: --metrics-file {folder}/job.prom: No such file or directory"
    assert (file.take_failure(), file.take_failure()) == (line, "")
    folder.mkdir()
    file.end()
    assert (folder / "job.prom").read_text() == "end\n"
    assert file.take_failure() == ""


def test_a_job_that_never_began_writes_nothing(tmp_path):
    MetricsFile(str(tmp_path / "job.prom"), contents(str, "end\n")).end()
    assert os.listdir(tmp_path) == []


def test_a_symlink_is_replaced_and_not_followed(tmp_path):
    path, other = tmp_path / "job.prom", tmp_path / "other"
    other.write_text("keep\n")
    path.symlink_to(other)
    metrics_file.write(str(path), "new\n")
    assert (path.read_text(), other.read_text(), path.is_symlink()) == ("new\n", "keep\n", False)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing/job.prom", "No such file or directory"),
        ("file/job.prom", "Not a directory"),
        ("folder", "Is a directory"),
        ("folder/", "Is a directory"),
        ("link", "Is a directory"),
        ("pipe", "this is no regular file, which hvdrun could replace"),
        ("link_to_pipe", "this is no regular file, which hvdrun could replace"),
    ],
)
def test_a_place_where_no_file_can_be_is_an_error_before_the_job(tmp_path, name, why):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link_to_pipe").symlink_to("pipe")
    there = sorted(os.listdir(tmp_path))
    with pytest.raises(UsageError, match=why) as raised:
        metrics_file.check(f"{tmp_path}/{name}")
    assert str(raised.value) == f"--metrics-file {tmp_path}/{name}: {why}"
    assert sorted(os.listdir(tmp_path)) == there
    assert (tmp_path / "link_to_pipe").is_symlink()
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
