"""`hvdrun --report-file FILE`: what programs learn of a job, however it ends."""

import json
import os
import signal
import stat
import subprocess
import time

import pytest

from hvdrun.errors import HostLost, SshFailed
from hvdrun.reports.failure_report import Failure, Verdict, of_error, of_rank
from hvdrun.reports.report_file import ReportFile
from tests.launcher.job.histories import command

SECRET = "a value that nobody may read"
RAISES = 'import os; 1 / (int(os.environ["RANK"]) - 1)'


@pytest.fixture
def report(tmp_path):
    it = ReportFile()
    it.path, it.command = str(tmp_path / "report.json"), ["python", "train.py"]
    return it


def read(path):
    return json.loads(path.read_text())


def test_while_the_job_runs_the_file_says_so(report, tmp_path):
    report.begin()
    found = read(tmp_path / "report.json")
    assert (found["format"], found["outcome"], found["exit_code"], found["end"]) == (
        *(1, "running"),
        *(None, None),
    )
    assert found["command"] == ["python", "train.py"]


def test_a_job_that_ends_well_has_no_failure(report, tmp_path):
    report.job, report.attempts, report.figures = command(a=2, b=1), 2, '{"size": 3}'
    assert report.end(0) == 0
    found = read(tmp_path / "report.json")
    assert (found["outcome"], found["num_proc"], found["attempts"]) == ("succeeded", 3, 2)
    assert found["hosts"] == [{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2]}]
    assert (found["failure"], found["metrics"]) == (None, {"size": 3})
    assert found["begin"].endswith("Z")
    assert found["begin"] <= found["end"]


@pytest.mark.parametrize(
    ("ended", "code", "name"), [("code 3", 3, None), ("oom 9", None, "SIGKILL")]
)
def test_a_rank_that_failed_is_told_with_its_evidence(report, tmp_path, ended, code, name):
    failure = Failure(1, "b", ended, 4.25, at=1e9)
    more = {"evidence": ("no disk",), "same": (1, 2), "waited_at": "x.py:3 in f"}
    report.verdict = Verdict(1, "failed", of_rank(failure, **more), num_proc=4)
    report.end(1)
    found = read(tmp_path / "report.json")["failure"]
    assert (found["rank"], found["host"], found["exit_code"]) == (1, "b", code)
    assert (found["signal"], found["after_s"]) == (name, 4.25)
    assert found["at"] == "2001-09-09T01:46:40.000Z"
    assert (found["evidence"], found["same_on"]) == (["no disk"], [1, 2])
    assert found["waited_at"] == "x.py:3 in f"
    assert found["message"] == "\n".join(report.verdict.lines())


def test_an_error_before_the_start_is_a_refusal_and_later_a_failure(report, tmp_path):
    error = SshFailed("b can't be reached", "look at b", host="b")
    for attempts, outcome in ((0, "refused"), (1, "failed")):
        report.attempts = attempts
        report.fail(error)
        report.end(70)
        found = read(tmp_path / "report.json")
        assert (found["outcome"], found["failure"]["cause"]) == (outcome, "ssh-failed")
        assert (found["failure"]["host"], found["failure"]["remedy"]) == ("b", "look at b")
        assert found["failure"]["message"] == "hvdrun: b can't be reached\n    look at b"


def test_an_error_that_the_verdict_is_about_is_told_once(report, tmp_path):
    error = HostLost("b is lost", host="b")
    operations = ("hvdrun: the last operation …",)
    of_host = of_error(error)._replace(operations=operations)
    report.verdict = Verdict(72, "failed", of_host, error)
    report.fail(error)
    report.end(72)
    found = read(tmp_path / "report.json")["failure"]
    assert found["operations"] == ["the last operation …"]
    assert found["message"] == "hvdrun: the last operation …\nhvdrun: b is lost"


def test_a_mistake_of_hvdrun_is_told_with_its_traceback(report, tmp_path):
    try:
        raise KeyError("x")
    except KeyError as error:
        report.fail(error)
    report.end(1)
    found = read(tmp_path / "report.json")["failure"]
    assert found["cause"] == "internal-error"
    assert (found["evidence"][0], found["evidence"][-1]) == (
        "Traceback (most recent call last):",
        "KeyError: 'x'",
    )


def test_it_is_an_ordinary_file_and_one_that_can_no_longer_be_written_is_a_line(
    report, tmp_path, capsys
):
    before = os.umask(0o027)
    try:
        report.begin()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == 0o640
    (tmp_path / "report.json").unlink()
    (tmp_path / "report.json").mkdir()
    assert report.end(3) == 3
    assert f"hvdrun: --report-file {tmp_path}/report.json: Is a dir" in capsys.readouterr().err


# ------------------------------------------------------------ for real


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["-np", "2", "true"], 0, ("succeeded", None)),
        (["-np", "3", "{python}", "-c", RAISES], 1, ("failed", "rank-failed", 1)),
        (["-np", "2", "sh", "-c", "kill -9 $$"], 137, ("failed", "rank-killed")),
        (["-np", "2", "no-such-program"], 69, ("failed", "command-not-found")),
        (["-np", "2", "--mpi-args", "--nonsense", "true"], 73, ("failed", "mpirun-failed")),
        (["-np", "2"], 64, ("refused", "usage", None)),
        (["-H", "a:x", "true"], 65, ("refused", "host-list", None)),
        (["--check", "-np", "1"], 0, ("succeeded", None)),
        (["--dry-run", "-np", "1", "true"], 0, None),
    ],
    ids=lambda each: " ".join(each)[:40] if isinstance(each, list) else "",
)
def test_the_file_says_how_the_job_went(hvdrun, python, tmp_path, words, code, expected):
    path = tmp_path / "report.json"
    words = [word.replace("{python}", str(python)) for word in words]
    done = hvdrun("--report-file", path, "-x", f"A_SECRET={SECRET}", *words)
    assert done.code == code, done
    if expected is None:
        assert not path.exists()
        return
    found = read(path)
    assert found["exit_code"] == code
    told = found["failure"] or {"cause": None}
    assert (found["outcome"], told["cause"]) == expected[:2]
    assert expected[2:] in ((), (told.get("rank"),))
    assert told.get("message", "").removesuffix("\n") in done.stderr or told["evidence"]
    assert SECRET not in path.read_text()
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("path", ["/no/such/report.json", "/", "/dev/null"])
def test_a_path_that_cannot_be_written_is_an_error_before_the_start(hvdrun, path):
    done = hvdrun("-np", "2", "--report-file", path, "sh", "-c", "echo started")
    assert (done.code, done.stdout) == (64, ""), done
    assert done.stderr.startswith(f"hvdrun: --report-file {path}: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_a_signal_ends_was_interrupted(python, tmp_path, number):
    path = tmp_path / "report.json"
    words = [python.with_name("hvdrun"), "-np", "2", "--report-file", path, "sleep", "60"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        while not path.exists() or read(path)["outcome"] != "running":
            time.sleep(0.02)
        process.send_signal(number)
    found = read(path)
    assert (found["outcome"], found["exit_code"]) == ("interrupted", 128 + number)
