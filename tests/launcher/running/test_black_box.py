"""After a failure hvdrun says where the ranks were among their operations, for real."""

import json
import os
import textwrap
from types import SimpleNamespace

import pytest

from hvdrun.running.result import keep_operations

# Rank 1 leaves after the second 'grad', in the way that it is told, once rank 0 waits for it.
LEAVES = """
import os, signal, sys, time
import torch
import hvdlite as hvd
from hvdlite.world import world

how, go = sys.argv[1:]
hvd.init()
for _ in range(2):
    hvd.allreduce(torch.ones(3), name="loss")
    hvd.allreduce(torch.ones(30000), name="grad")
if hvd.rank() == 0:
    engine = world.current().team.engine
    engine.record(10)
    handle = hvd.allreduce_async(torch.ones(3), name="loss")
    while not engine.drain_events()[0]:  # the engine has seen it
        time.sleep(0.001)
    open(go, "w").close()
    hvd.synchronize(handle)
else:
    while not os.path.exists(go):
        time.sleep(0.001)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise RuntimeError("no more data")
    if how == "leaves":
        hvd.shutdown()
        sys.exit()
    hvd.allreduce(torch.ones(3), name="another")
"""
LAST = "the last operation that ranks 0-1 have all ended is allreduce 'grad' (no. 2)\n"
WAITS = "    rank 0 went on to allreduce 'loss' (no. 3), which rank 1 has not called\n"


@pytest.fixture
def run(hvdrun, tmp_path, monkeypatch):
    """run(how, *options): a job of two ranks, and what is in its folder black-box."""
    script = tmp_path / "train.py"
    script.write_text(LEAVES)

    def start(how, *options, variables=None):
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)
        logs = tmp_path / "logs"
        done = hvdrun(
            "-np", "2", "--output-dir", logs, *options, "python", script, how, tmp_path / "go"
        )
        folder = logs / "black-box"
        found = {path.name: path.read_text() for path in folder.glob("*")}
        return done, found

    return start


def operations(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("hosts", [pytest.param("2", marks=pytest.mark.wide_in("openmpi")), "1,1"])
def test_what_a_rank_did_last_is_known_after_it_was_killed(run, hosts, tmp_path):
    done, found = run("is killed", variables={"HVDLITE_HOST_RANKS": hosts})
    assert done.code == 137, done
    where = LAST + WAITS + "    rank 1 called no operation after that\n"
    assert f"hvdrun: {where}" in done.stderr, done
    assert f"hvdrun: the ranks' last operations are in {tmp_path}/logs/black-box\n" in done.stderr
    assert sorted(found) == ["rank.0.jsonl", "rank.1.jsonl", "summary.txt"]
    assert found["summary.txt"].endswith(where), found
    killed = operations(found["rank.1.jsonl"])
    assert [(each["name"], each["round"]) for each in killed[-4:]] == [
        *(("loss", 1), ("grad", 1)),
        *(("loss", 2), ("grad", 2)),
    ]
    for each in killed:
        assert each["posted"] <= each["matched"] <= each["started"] <= each["ended"]
        assert not each["failed"]
    waits = operations(found["rank.0.jsonl"])[-1]
    assert (waits["name"], waits["round"], waits["matched"]) == ("loss", 3, None)
    for path in (tmp_path / "logs/black-box").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.wide_in("mpich")
def test_the_report_on_a_rank_that_raised_goes_on_with_it(run):
    done, _ = run("raises")
    assert done.code == 1, done
    assert "RuntimeError: no more data\n" in done.stderr
    assert done.stderr.index("no more data") < done.stderr.index(LAST), done
    assert WAITS in done.stderr, done


@pytest.mark.wide_in("openmpi")
def test_a_rank_that_left_before_the_others_failed_is_in_it(run):
    done, found = run("leaves", variables={"HVDLITE_HOST_RANKS": "1,1"})
    assert done.code == 1, done
    assert LAST + WAITS in done.stderr, done
    assert "    rank 1 called no operation after that" in done.stderr
    assert operations(found["rank.1.jsonl"])[-1]["name"] == "grad"


@pytest.mark.wide_in("mpich")
def test_after_the_stall_check_has_ended_a_job_it_says_who_called_what(run):
    done, _ = run("calls another", "--stall-check-shutdown-time-seconds", "3")
    assert done.code == 1, done
    assert (
        LAST
        + WAITS
        + "    rank 1 went on to allreduce 'another', which rank 0 has not called\n"
        + "    rank 1 called allreduce 'another' where rank 0 called allreduce 'loss' (no. 3)\n"
    ) in done.stderr, done


@pytest.mark.wide_in("openmpi")
def test_it_can_be_switched_off(run):
    done, found = run("is killed", "--no-black-box")
    assert done.code == 137, done
    assert "last operation" not in done.stderr
    assert found == {}


@pytest.mark.parametrize(
    ("signal_", "keeps_files", "written"),
    [(None, True, True), (2, True, False), (None, False, False)],
)
def test_after_ctrl_c_or_without_a_folder_no_files_are_made(signal_, keeps_files, written):
    made = []
    files = SimpleNamespace(keep_operations=lambda *_: "kept")
    recorded = SimpleNamespace(rows=lambda: made.append("rows") or {0: []}, summary=list)
    course = SimpleNamespace(signal=signal_, recorded=recorded)
    screen = SimpleNamespace(files=files if keeps_files else None)
    assert keep_operations(course, screen) == ("kept" if written else "")
    assert made == (["rows"] if written else [])


@pytest.mark.wide_in("mpich")
def test_a_job_that_ends_well_leaves_no_folder(hvdrun, tmp_path):
    script = "import torch, hvdlite as hvd; hvd.init(); hvd.allreduce(torch.ones(3))"
    done = hvdrun("-np", "2", "--output-dir", tmp_path, "python", "-c", script)
    assert done.code == 0, done
    assert not (tmp_path / "black-box").exists()
    assert "last operation" not in done.stderr


@pytest.mark.wide_in("openmpi")
def test_a_rank_that_writes_nonsense_changes_nothing_else(hvdrun, tmp_path):
    script = textwrap.dedent("""
        import os, sys
        from hvdlite.world.telling import launcher_link
        from hvdrun.for_hvdlite import notes
        fd = os.memfd_create("x")
        os.write(fd, os.urandom(69632))
        assert launcher_link.tell(notes.BLACK_BOX)
        assert launcher_link.tell(notes.BLACK_BOX, b"", [fd])
        sys.exit(7)
    """)
    done = hvdrun("-np", "2", "--output-dir", tmp_path, "python", "-c", script)
    assert done.code == 7, done
    assert "last operation" not in done.stderr
    assert not (tmp_path / "black-box").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.wide_in("mpich")
def test_another_users_symlink_in_place_of_the_folder_is_refused(run, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    trap = tmp_path / "logs/black-box"
    trap.symlink_to(tmp_path / "elsewhere")
    os.chown(trap, 4321, 4321, follow_symlinks=False)
    done, _ = run("is killed")
    assert done.code == 137, done
    assert "hvdrun: the ranks' last operations are not in --output-dir: this symlink" in done.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
