"""Traces of torch.profiler, a file per rank."""

import json
import os
import socket
from pathlib import Path

import pytest
import torch

import hvdlite as hvd
from hvdlite.recipes import profile

HOST = socket.gethostname()
EVERY = torch.profiler.ProfilerAction.RECORD_AND_SAVE
CPU = [torch.profiler.ProfilerActivity.CPU]


def profiles(folder, with_schedule):
    hvd.init()
    os.umask(0o022)
    ready = []
    if not with_schedule:
        with profile(folder, activities=CPU):
            torch.ones(hvd.rank() + 2, 3).sum()
        return ready
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(
        folder, activities=CPU, schedule=schedule, on_trace_ready=lambda p: ready.append(p.step_num)
    ) as profiler:
        for step in range(9):
            with torch.profiler.record_function(f"part {step} of rank {hvd.rank()}"):
                torch.ones(3).sum()
            profiler.step()
    return ready


def trace(path):
    return json.loads(path.read_text())


@pytest.mark.ranks(2, 3)
def test_each_rank_writes_one_trace_which_says_the_rank(world, tmp_path):
    folder = tmp_path / "made" / "traces"
    world.run(profiles, str(folder), False)
    assert sorted(os.listdir(folder)) == [f"rank{rank}-{HOST}.json" for rank in range(world.size)]
    for rank in range(world.size):
        path = folder / f"rank{rank}-{HOST}.json"
        assert path.stat().st_mode & 0o777 == 0o644
        found = trace(path)
        assert found["rank"] == found["distributedInfo"]["rank"] == rank
        assert found["distributedInfo"]["world_size"] == world.size
        names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
        assert names
        assert all(name.startswith(f"rank {rank} on {HOST}: ") for name in names)
        assert any(e["name"] == "aten::ones" for e in found["traceEvents"])


@pytest.mark.ranks(2)
def test_a_schedule_is_passed_on_and_each_of_its_traces_is_a_file(world, tmp_path):
    ready = world.run(profiles, str(tmp_path), True)
    assert ready[0] == ready[1]
    assert len(ready[0]) == 2
    names = [f"rank{rank}-{HOST}{n}.json" for rank in range(2) for n in (".2", "")]
    assert sorted(os.listdir(tmp_path)) == names
    for rank in range(2):
        for name, steps in (("", {2, 3}), (".2", {6, 7})):
            found = trace(tmp_path / f"rank{rank}-{HOST}{name}.json")
            parts = {e["name"] for e in found["traceEvents"] if e["name"].startswith("part ")}
            assert parts == {f"part {step} of rank {rank}" for step in steps}
            assert found["distributedInfo"]["rank"] == rank


def test_a_link_in_place_of_the_trace_is_replaced_and_not_followed(tmp_path, world_of_one):
    other = tmp_path / "other"
    other.write_text("precious")
    folder = tmp_path / "traces"
    folder.mkdir()
    place = folder / f"rank{hvd.rank()}-{HOST}.json"
    place.symlink_to(other)
    with profile(folder, activities=CPU):
        pass
    assert other.read_text() == "precious"
    assert not place.is_symlink()
    assert trace(place)["rank"] == hvd.rank()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")
def test_another_users_link_in_place_of_the_folder_is_refused(tmp_path, world_of_one):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    trap = shared / "traces"
    trap.symlink_to(tmp_path / "elsewhere")
    os.lchown(trap, 4321, 4321)
    with (
        pytest.raises(PermissionError, match="this symlink belongs to user 4321"),
        profile(trap, activities=CPU),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()


def profile_that_fails(folder):
    def fail(profiler):
        raise OSError("no space")

    with profile(folder, activities=CPU, schedule=lambda _: EVERY, on_trace_ready=fail) as profiler:
        torch.ones(3)
        profiler.step()


def test_an_exception_in_a_step_of_the_profiler_does_not_crash_it(tmp_path, world_of_one):
    with pytest.raises(OSError, match="no space"):
        profile_that_fails(tmp_path)
    for path in Path(tmp_path).iterdir():
        assert trace(path)["rank"] == hvd.rank()
