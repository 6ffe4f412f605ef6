"""The timeline's file: whole after each write, whoever writes."""

import fcntl
import json
import os
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


def test_a_full_disk_leaves_the_array_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    file, _, _ = made(path)
    write, left = os.pwrite, [30]

    def full(descriptor, text, at):
        if len(text) > 10 and not left[0]:
            raise OSError(28, "No space left on device")
        done = write(descriptor, text[: left[0] or None], at)
        left[0] = 0
        return done

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(encoded([{"name": "x" * 100}]))
    assert names(path) == ["first"]


def test_a_stopped_writer_that_holds_the_lock_is_told(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    file, place, _ = made(path)
    monkeypatch.setattr(trace_file, "LOCK_S", 0.05)
    with open(place, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another rank has held the file's lock"):
            file.write(encoded([FIRST]))
    file.write(encoded([FIRST]))
    assert names(path) == ["first", "first"]


def test_a_file_system_without_locks_has_one_writer(tmp_path, monkeypatch):
    def fails(descriptor, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fails)
    path = tmp_path / "trace.json"
    file, place, known_as = made(path)
    assert known_as is None
    assert open_shared(place, known_as) is None
    file.write(encoded([FIRST]))
    assert names(path) == ["first", "first"]


def test_another_file_under_the_path_is_not_written_to(tmp_path):
    path = tmp_path / "trace.json"
    _, place, known_as = made(path)
    path.rename(tmp_path / "moved")
    path.write_text("mine")
    assert open_shared(place, known_as) is None
    assert path.read_text() == "mine"
