"""The lines from which a rank has waited for hvdlite last, as its keeper finds them."""

import math
import mmap
import os
import threading
import zlib

import pytest

from hvdlite.world.telling import last_line
from hvdrun.machine.notes import HEAD_BYTES, LINES_AT, lines_in


@pytest.fixture
def memory(monkeypatch):
    found = mmap.mmap(-1, HEAD_BYTES)
    for name, value in (("_memory", None), ("due", math.inf)):
        monkeypatch.setattr(last_line, name, value)
    monkeypatch.setattr(last_line, "_is_script", {})
    last_line.keep_in(found)
    return found


def lines(memory):
    return lines_in(memory[:], zlib.crc32).decode().splitlines()


def wait():
    last_line.look()


def test_the_innermost_lines_of_the_script_are_kept(memory):
    wait()
    number = wait.__code__.co_firstlineno + 1
    found = lines(memory)
    assert found[0] == f'  File "{__file__}", line {number} in wait'
    assert found[1].endswith(" in test_the_innermost_lines_of_the_script_are_kept")
    assert not any("/site-packages/" in line or "hvdlite/world/" in line for line in found)


def test_a_relative_name_of_code_is_kept_where_the_working_directory_is_gone(
    memory, monkeypatch, tmp_path
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    exec(compile("look()", "cell.py", "exec"), {"look": last_line.look})
    assert lines(memory)[0] == '  File "cell.py", line 1 in <module>'


def test_they_are_written_once_in_a_while(memory, monkeypatch):
    now = 100.0
    monkeypatch.setattr(last_line, "clock", lambda: now)
    wait()
    memory[LINES_AT:] = bytes(HEAD_BYTES - LINES_AT)
    now += last_line.EVERY_S * 0.9
    wait()
    assert lines(memory) == []
    now += last_line.EVERY_S * 0.2
    wait()
    assert " in wait" in lines(memory)[0]


def test_other_threads_and_forks_leave_them_alone(memory):
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    if not (child := os.fork()):
        wait()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert lines(memory) == []
    wait()
    assert lines(memory)


def test_without_memory_nothing_is_done(monkeypatch):
    monkeypatch.setattr(last_line, "_memory", None)
    monkeypatch.setattr(last_line, "due", math.inf)
    wait()
    assert last_line.due == math.inf
