"""The timeline's file: complete at each moment, whoever writes."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import mmap
import os
import resource
import signal
import threading

import pytest

from hvdlite.observe import trace_file
from hvdlite.observe.trace_file import create, encoded, open_shared

FIRST = {"name": "first"}


def made(path):
    return create(str(path), encoded([FIRST]))


def names(path):
    return [event["name"] for event in json.loads(path.read_text())]


def test_it_is_an_array_after_each_write(tmp_path):
    path = tmp_path / "trace.json"
    file, place, known_as = made(path)
    assert place == str(path)
    assert names(path) == ["first"]
    other = open_shared(place, known_as)
    for i in range(3):
        (file, other)[i % 2].write(encoded([{"name": f"{i}"}, {"name": "größe\n"}]))
        assert len(names(path)) == 3 + 2 * i
    file.close()
    file.close()
    other.write(encoded([{"name": "after the first writer's end"}]))
    assert names(path)[-1] == "after the first writer's end"
    other.close()


def test_writers_do_not_overwrite_each_other(tmp_path):
    path = tmp_path / "trace.json"
    first, place, known_as = made(path)
    files = [first, *(open_shared(place, known_as) for _ in range(3))]

    def write(number):
        for i in range(100):
            files[number].write(encoded([{"name": f"{number}.{i}"}] * (i % 5)))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = names(path)
    for number in range(4):
        mine = [int(name.partition(".")[2]) for name in found if name.startswith(f"{number}.")]
        assert mine == [i for i in range(100) for _ in range(i % 5)]


def lines_of_all_lengths():
    return encoded([{"name": "x" * (i * 7 % 900), "number": i} for i in range(200)])


@pytest.fixture
def each_moment(monkeypatch):
    """The numbers of the events in the file, at each moment at which a kill may come. The kernel
    ends a write between pages, so each one must lie in a block, in the file and in memory."""
    moments = []
    pwrite, store = os.pwrite, trace_file._store

    def seen(descriptor):
        whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        moments.append([event.get("number") for event in json.loads(whole)])

    def watched_pwrite(descriptor, text, at):
        assert at // 4096 == (at + len(text) - 1) // 4096
        if len(text) > len(trace_file.GAP):
            address = ctypes.addressof(ctypes.c_char.from_buffer(text.obj))
            assert address % 4096 == 0
        done = pwrite(descriptor, text, at)
        seen(descriptor)
        return done

    def watched_store(pages, at):
        store(pages, at)
        moments.append("stored")

    monkeypatch.setattr(os, "pwrite", watched_pwrite)
    monkeypatch.setattr(trace_file, "_store", watched_store)
    return moments


def test_it_is_complete_after_every_step_of_every_write(tmp_path, each_moment):
    path = tmp_path / "trace.json"
    file, place, known_as = made(path)
    files = file, open_shared(place, known_as)
    lines = lines_of_all_lengths()
    while lines:
        batch, lines = lines[:7], lines[7:]
        files[len(lines) % 2].write(batch)
        assert not batch
    assert [event.get("number") for event in json.loads(path.read_text())] == [None, *range(200)]
    counts = [len(moment) for moment in each_moment if moment != "stored"]
    assert counts == sorted(counts)
    assert each_moment.count("stored") > 20


def test_the_next_writer_goes_on_after_a_kill_at_any_step(tmp_path, monkeypatch):
    """A writer is killed after each of its system calls in turn, and another one writes on."""
    pwrite, store = os.pwrite, trace_file._store

    class Killed(BaseException):
        pass

    def killed_after(act, *args):
        nonlocal left
        done = act(*args)
        left -= 1
        if not left:
            raise Killed
        return done

    step = 0
    while True:
        step, path = step + 1, tmp_path / "trace.json"
        left = step
        file, place, known_as = made(path)
        other = open_shared(place, known_as)
        monkeypatch.setattr(os, "pwrite", functools.partial(killed_after, pwrite))
        monkeypatch.setattr(trace_file, "_store", functools.partial(killed_after, store))
        killed = True
        try:
            file.write(lines_of_all_lengths()[:60])
            killed = False
        except Killed:
            pass
        monkeypatch.undo()
        before = json.loads(path.read_text())
        other.write(lines_of_all_lengths()[60:])
        numbers = [event.get("number") for event in json.loads(path.read_text())]
        assert numbers == [None, *range(len(before) - 1), *range(60, 200)]
        if not killed:
            break
    assert step > 8


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_it_is_complete_after_kill_9_at_any_time(tmp_path):
    for attempt in range(25):
        path = tmp_path / f"{attempt}.json"
        file, place, known_as = made(path)
        files = [file, open_shared(place, known_as)]
        children = []
        for each in files:
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    while True:
                        each.write(lines_of_all_lengths())
                os._exit(0)
            children.append(child)
        while path.stat().st_size < 30_000 * (attempt + 1):
            pass
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert len(json.loads(path.read_text())) > 30


def test_a_file_that_can_not_be_mapped_is_written_all_the_same(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    file, _, _ = made(path)
    anonymous = mmap.mmap

    def fails(descriptor, length, **options):
        if descriptor != -1:
            raise OSError(errno.ENODEV, "No such device")
        return anonymous(descriptor, length, **options)

    monkeypatch.setattr(mmap, "mmap", fails)
    file.write(lines_of_all_lengths())
    assert len(json.loads(path.read_text())) == 201


def test_a_full_disk_leaves_a_complete_array(tmp_path, monkeypatch):
    pwrite = os.pwrite
    for room in range(1, 40_000, 711):
        path = tmp_path / "trace.json"
        file, _, _ = made(path)

        def full(descriptor, text, at, room=room):
            if at >= room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(descriptor, text[: room - at], at)

        monkeypatch.setattr(os, "pwrite", full)
        lines = lines_of_all_lengths()
        with pytest.raises(OSError, match="No space left"):
            file.write(lines)
        monkeypatch.undo()
        in_file = [event.get("number") for event in json.loads(path.read_text())]
        assert in_file == [None, *range(200 - len(lines))]
        file.write(lines)
        assert len(json.loads(path.read_text())) == 201


def test_a_limit_of_file_sizes_is_as_a_full_disk(tmp_path):
    path = tmp_path / "trace.json"
    file, _, _ = made(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write(lines_of_all_lengths())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 4096 < path.stat().st_size <= 6000
    json.loads(path.read_text())


def test_a_file_that_another_program_has_changed_is_left_alone(tmp_path):
    path = tmp_path / "trace.json"
    file, _, _ = made(path)
    path.write_text("mine")
    with pytest.raises(OSError, match="another program has changed the file"):
        file.write(encoded([FIRST]))
    assert path.read_text() == "mine"


def test_a_stopped_writer_that_holds_the_lock_is_told(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    file, _, known_as = made(path)
    monkeypatch.setattr(trace_file, "LOCK_S", 0.05)
    with open(known_as.lock_path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another rank has held the file's lock"):
            file.write(encoded([FIRST]))
    file.write(encoded([FIRST]))
    assert names(path) == ["first", "first"]


@pytest.mark.parametrize("lock", [fcntl.flock, fcntl.lockf])
def test_who_may_only_read_the_file_holds_up_no_writer(tmp_path, monkeypatch, lock):
    path = tmp_path / "trace.json"
    file, place, known_as = made(path)
    monkeypatch.setattr(trace_file, "LOCK_S", 0.05)
    with open(place, "rb") as other:
        lock(other, fcntl.LOCK_SH)
        for each in (file, open_shared(place, known_as)):
            each.write(encoded([FIRST]))
    assert names(path) == ["first"] * 3


def test_a_lock_that_is_another_processs_descriptor_is_not_used(tmp_path):
    _, place, known_as = made(tmp_path / "trace.json")
    for path in (place, "/proc/self/fd/0", "/proc/1234567/fd/3"):
        assert open_shared(place, known_as._replace(lock_path=path)) is None


def test_another_file_under_the_path_is_not_written_to(tmp_path):
    path = tmp_path / "trace.json"
    _, place, known_as = made(path)
    path.rename(tmp_path / "moved")
    path.write_text("mine")
    assert open_shared(place, known_as) is None
    assert path.read_text() == "mine"
