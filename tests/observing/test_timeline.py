"""The timeline: one file, a row per rank, every operation from state to state."""

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections import defaultdict

import psutil
import pytest
import torch

import hvdlite as hvd
from hvdlite import timeline
from hvdlite.observe.trace_row import TraceRow
from tests.harness.needs import lacking
from tests.harness.worlds import mpiexec_command, python_of

STATES = ["POSTED", "MATCHED", "RUNNING"]


def spans(events):
    """[(row, title, what it was in, arguments)], from the viewer's point of view: an inner span
    ends before the one around it."""
    stacks, found = defaultdict(list), []
    inner = defaultdict(list)
    for event in sorted(
        (event for event in events if event["ph"] in "be"), key=lambda event: event["ts"]
    ):
        key = (event["pid"], event["cat"], event["id"])
        if event["ph"] == "b":
            stacks[key].append(event["name"])
            continue
        assert stacks[key].pop() == event["name"]
        if stacks[key]:
            inner[key].append(event["name"])
        else:
            found.append((event["pid"], event["name"], inner.pop(key), event["args"]))
    assert not any(stacks.values())
    return found


def works(path, names):
    hvd.init()
    hvd.start_timeline(path)
    last = hvd.add_process_set([hvd.size() - 1])
    for name in names:
        hvd.allreduce(torch.ones(10), name=name)
    hvd.broadcast(torch.ones(100_000), 0, name="large")
    if last.included():
        hvd.allgather(torch.ones(3), name="of one", process_set=last)
    hvd.remove_process_set(last)
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(10), name="after")


NAMES = ["plain", 'a "quoted"\nname', "größe", "x" * 300]


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_every_rank_has_a_row_with_each_operation_state_by_state(world, tmp_path):
    path = tmp_path / "timeline.json"
    world.run(works, str(path), NAMES)
    events = json.loads(path.read_text())
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(rows) == list(range(world.size))
    assert all(rows[rank].startswith(f"rank {rank} on ") for rank in rows)
    found = spans(events)
    for rank in range(world.size):
        mine = {title: (states, args) for row, title, states, args in found if row == rank}
        for name in NAMES[:3]:
            states, args = mine[f"allreduce {name}"]
            assert states == STATES
            assert args == {"state": "DONE", "bytes": 40, "process_set": 0}
        assert any(title.startswith("allreduce xxxxx") for title in mine)
        assert mine["broadcast large"][1]["bytes"] == 400_000
        assert ("allgather of one" in mine) == (rank == world.size - 1)
        assert "allreduce after" not in mine


def sends(path):
    """As on another host: only rank 0 sees the file."""
    from hvdlite.observe import trace_file

    hvd.init()
    opened = trace_file.open_shared
    if hvd.rank():
        trace_file.open_shared = lambda *place: None
    try:
        hvd.start_timeline(path)
        for i in range(200):
            hvd.allreduce(torch.ones(2), name=f"sent {i}")
        hvd.stop_timeline()
    finally:
        trace_file.open_shared = opened


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
def test_ranks_that_do_not_see_the_file_send_to_rank_0(world, tmp_path):
    path = tmp_path / "timeline.json"
    world.run(sends, str(path))
    titles = {(row, title) for row, title, _, _ in spans(json.loads(path.read_text()))}
    assert titles >= {
        (rank, f"allreduce sent {i}") for rank in range(world.size) for i in range(200)
    }


def writes_twice(folder):
    hvd.init()
    for i in range(2):
        hvd.start_timeline(f"{folder}/{i}.json")
        with pytest.raises(ValueError, match="already being written; call stop_timeline"):
            hvd.start_timeline(f"{folder}/other.json")
        hvd.allreduce(torch.ones(1), name=f"of {i}")
        hvd.stop_timeline()
    hvd.stop_timeline()
    with pytest.raises(ValueError, match="start_timeline: can't write '/nowhere/x'"):
        hvd.start_timeline("/nowhere/x")
    hvd.barrier()


@pytest.mark.ranks(1, 2)
def test_it_can_be_stopped_and_started_again_and_says_what_it_can_not_write(world, tmp_path):
    world.run(writes_twice, str(tmp_path))
    for i in range(2):
        titles = {
            title for _, title, _, _ in spans(json.loads((tmp_path / f"{i}.json").read_text()))
        }
        assert f"allreduce of {i}" in titles
        assert f"allreduce of {1 - i}" not in titles


def writes_to_a_link(path):
    hvd.init()
    with pytest.raises(ValueError, match=r"can't write '.*': .*this symlink belongs to user 4242"):
        hvd.start_timeline(path)
    hvd.barrier()


@pytest.mark.ranks(2)
def test_another_users_symlink_leads_it_nowhere(world, tmp_path):
    if os.geteuid() != 0:
        lacking("what another user has made needs root")
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "timeline.json").symlink_to(tmp_path / "mine")
    os.chown(tmp_path / "timeline.json", 4242, 4242, follow_symlinks=False)
    world.run(writes_to_a_link, str(tmp_path / "timeline.json"))
    assert (tmp_path / "mine").read_text() == "kept"


def steps_with_the_knob():
    hvd.init()
    hvd.allreduce(torch.ones(1), name="by the knob")
    hvd.shutdown()


@pytest.mark.ranks(2)
def test_the_knob_writes_one_from_init_to_shutdown(world, tmp_path):
    path = tmp_path / "timeline.json"
    world.run(steps_with_the_knob, knobs={"HVDLITE_TIMELINE": str(path)})
    events = json.loads(path.read_text())
    assert {(row, title) for row, title, _, _ in spans(events)} >= {
        (rank, "allreduce by the knob") for rank in range(world.size)
    }


ENDS = """
import sys, torch, hvdlite as hvd
hvd.init()
hvd.start_timeline(sys.argv[1])
hvd.allreduce(torch.ones(5), name="the last")
{end}
"""


@pytest.mark.parametrize(
    ("mpi", "end"),
    [
        ("openmpi", ""),
        ("mpich", "hvd.shutdown()"),
        ("openmpi", "sys.exit(hvd.rank() % 2 and None)"),
    ],
)
def test_the_file_is_whole_after_every_normal_end(mpi, end, tmp_path):
    path = tmp_path / "timeline.json"
    program = ENDS.format(end=end)
    command = [*mpiexec_command(mpi, 2), str(python_of(mpi)), "-c", program, str(path)]
    subprocess.run(command, check=True, timeout=90)
    titles = {(row, title) for row, title, _, _ in spans(json.loads(path.read_text()))}
    assert titles >= {(rank, "allreduce the last") for rank in (0, 1)}


def writes_to_a_pipe(path):
    hvd.init()
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(2), name="piped")
    hvd.stop_timeline()


@pytest.mark.ranks(2)
@pytest.mark.hosts("2")
@pytest.mark.mpis("openmpi")
def test_a_pipe_gets_a_whole_array(world, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, text=True) as reader:
        world.run(writes_to_a_pipe, str(path))
        text, _ = reader.communicate(timeout=30)
    titles = {(row, title) for row, title, _, _ in spans(json.loads(text))}
    assert titles == {(0, "allreduce piped"), (1, "allreduce piped")}


@pytest.mark.ranks(1)
@pytest.mark.mpis("openmpi")
def test_dynamic_is_no_file(world, tmp_path):
    world.run(steps_with_the_knob, knobs={"HVDLITE_TIMELINE": "DYNAMIC"})
    assert not os.path.exists("DYNAMIC")


KILLED = """
import sys, torch, hvdlite as hvd
hvd.init()
hvd.start_timeline(sys.argv[1])
while True:
    hvd.allreduce(torch.ones(5), name="until killed")
"""


def file_of_a_killed_job(mpi, path):
    command = [*mpiexec_command(mpi, 2), str(python_of(mpi)), "-c", KILLED, str(path)]
    with subprocess.Popen(command, start_new_session=True) as job:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if path.read_text().count("until killed") > 100:
                    break
            time.sleep(0.05)
        everyone = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        for process in everyone:
            process.kill()
        psutil.wait_procs(everyone, timeout=10)
    return path.read_text()


@pytest.mark.wide
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_the_file_of_a_killed_job_can_be_read(mpi, tmp_path):
    events = json.loads(file_of_a_killed_job(mpi, tmp_path / "timeline.json"))
    assert sum("until killed" in event["name"] for event in events) > 100


def writes_while_the_lock_is_held(path):
    hvd.init()
    timeline.MOST_UNWRITTEN = 50
    timeline.trace_file.LOCK_S = 0.05
    hvd.start_timeline(path)
    active = timeline._active
    with open(f"/proc/self/fd/{active._file._lock_descriptor}", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        while not active._dropped:
            hvd.allreduce(torch.ones(2), name="x")
        assert len(active._unwritten) < 50 + 3 * timeline.CAPACITY
        fcntl.flock(other, fcntl.LOCK_UN)
    hvd.stop_timeline()


@pytest.mark.ranks(1)
def test_what_a_full_backlog_dropped_is_told_in_the_file(world, tmp_path):
    path = tmp_path / "timeline.json"
    world.run(writes_while_the_lock_is_held, str(path))
    dropped = [e["name"] for e in json.loads(path.read_text()) if "were dropped" in e["name"]]
    assert dropped
    assert dropped[0].endswith(": the file, or rank 0, did not take them in time")


def test_lost_events_are_told_and_the_rest_is_still_in_order():
    row = TraceRow(3, "here")
    events = [(1000, 7, "allreduce", "x", "RUNNING", 4), (2000, 7, "allreduce", "x", "DONE", 4)]
    told, *rest = row.lines(0, events, 12)
    assert told["name"] == "12 events were lost: too many at once"
    assert [(e["ph"], e["name"]) for e in rest] == [
        ("b", "allreduce x"),
        ("b", "RUNNING"),
        ("e", "RUNNING"),
        ("e", "allreduce x"),
    ]
    assert rest[-1]["ts"] - rest[0]["ts"] == pytest.approx(1.0)
