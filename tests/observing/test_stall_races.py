"""Ranks that post a late operation while it is reported: there is one report, and it is true."""

import array
import fcntl
import os
import re
import termios
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.observing.reports import WARNS, Said, end, start


def reports_that_cross_the_answer():
    hvd.init()
    rank, names = hvd.rank(), [f"late {i}" for i in range(1500)]
    said = Said()
    # Rank 0 has reported all when rank 1 finds some late, and rank 2 posts them just then.
    if rank == 2:
        time.sleep(1.2)
    handles = {}
    for name in names:
        handles[name] = start(name)
        if rank:
            time.sleep(0.001)
    end(handles)
    hvd.barrier()
    reports = [line for line in said.lines() if " has waited " in line]
    count = Counter(line.partition(" has waited ")[0] for line in reports)
    assert count
    assert max(count.values()) == 1, count.most_common(3)


@pytest.mark.hosts("1,1,1")
@pytest.mark.wide_in("mpich")
def test_a_report_that_crosses_the_answer_is_no_second_one(world):
    world.run(reports_that_cross_the_answer, knobs=WARNS)


def close_to_the_limit():
    hvd.init()
    said = Said()
    begin = time.monotonic()
    names = [f"n{i}" for i in range(60)]
    waits = hvd.rank() == 0
    handles = {name: start(name) if waits else None for name in names}
    # The others post one after the other while they are being reported.
    for i, name in enumerate(names):
        while not waits and time.monotonic() < begin + 0.9 + i * 0.01:
            time.sleep(0.001)
        handles[name] = handles[name] or start(name)
    end(handles)
    hvd.barrier()
    lines = [line for line in said.lines() if " has waited " in line]
    told = [line.split("'")[1] for line in lines]
    assert len(set(told)) == len(told)
    for name, line in zip(told, lines, strict=True):
        assert re.search(r"\); called by ranks? (\d, )*0", line), line
        assert not re.search(f"which (has been in|last finished) allreduce '{name}'", line), line


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1", "2,1")
@pytest.mark.wide_in(3, "2,1")
def test_an_operation_that_a_rank_posts_during_its_report_is_reported_truly(world):
    world.run(close_to_the_limit, knobs=WARNS)


class Sluice:
    """Lets one line through to stderr, and holds this process up at the next until it is opened."""

    FULL = 3700  # of the 4096 bytes of a page: there is room for one report, and not for two

    def __init__(self):
        self._log = os.dup(2)
        self._read, write = os.pipe()
        assert fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096) == 4096
        os.write(write, b"\n" * self.FULL)
        os.dup2(write, 2)
        os.close(write)
        self._copier = threading.Thread(target=self._copy)

    def _copy(self):
        while chunk := os.read(self._read, 4096):
            os.write(self._log, chunk)

    def has_passed_a_line(self):
        waiting = array.array("i", [0])
        fcntl.ioctl(self._read, termios.FIONREAD, waiting)
        return waiting[0] > self.FULL

    def open(self):
        self._copier.start()

    def close(self):
        os.dup2(self._log, 2)
        self._copier.join()
        os.close(self._read)
        os.close(self._log)


def wait_until(is_true):
    deadline = time.monotonic() + 50.0
    while not is_true():
        assert time.monotonic() < deadline, is_true
        time.sleep(0.01)


def held_up_between_two_reports():
    hvd.init()
    folder = Path(os.environ["HVDLITE_TEST_FOLDER"])
    reports, done = folder / "rank 0 reports", folder / "the others have gone on"
    names = [f"n{i}" for i in range(60)]
    said = Said()
    if hvd.rank() == 0:
        sluice = Sluice()
        handles = {name: start(name) for name in names}
        wait_until(sluice.has_passed_a_line)
        reports.touch()
        wait_until(done.exists)
        sluice.open()
        end(handles)
        reports.unlink()
    else:
        wait_until(reports.exists)
        # The last one is not the first that rank 0 reports.
        handles = {name: start(name) for name in reversed(names)}
        if worlds.current().placement.hosts == ((0, 1, 2),):
            end(handles)  # without rank 0, whose data is there
            done.touch()
        else:
            time.sleep(0.5)
            done.touch()
            end(handles)
        wait_until(lambda: not reports.exists())  # the barrier would be what they last did
    hvd.barrier()
    if hvd.rank() == 0:
        sluice.close()
        done.unlink()
    hvd.barrier()
    lines = [line for line in said.lines() if " has waited " in line]
    assert lines
    for line in lines:
        name = line.split("'")[1]
        assert not re.search(f"which (has been in|last finished) allreduce '{name}'", line), line


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in("2,1")
def test_reports_are_true_where_the_reporting_rank_is_held_up_between_two(world):
    world.run(held_up_between_two_reports, knobs=WARNS)
