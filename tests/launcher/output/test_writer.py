"""A thread writes terminal output and files beside the loop that supervises the job."""

import errno
import os
import select
import time

import pytest

from hvdrun.errors import UsageError
from hvdrun.output.output_dir import OPEN_AT_ONCE, OutputDir
from hvdrun.output.writer import FULL_BYTES, PIECE_BYTES, ROOM_BYTES, Writer, joined, write_all

LIMIT_S = 20.0


def soon():
    return time.monotonic() + LIMIT_S


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    fds = [reader, writer]
    yield fds
    for fd in fds:
        os.close(fd)


def read_exactly(fd, count):
    parts = b""
    while len(parts) < count:
        parts += os.read(fd, count - len(parts))
    return parts


def test_nothing_is_lost_and_all_is_in_order(pipe):
    writer = Writer()

    def sink(data):
        write_all(pipe[1], data)

    text = b"".join(b"%d\n" % i for i in range(100_000))
    for begin in range(0, len(text), 1000):
        writer.write(sink, text[begin : begin + 1000])
    assert read_exactly(pipe[0], len(text)) == text
    assert writer.drain(soon())


def test_a_reader_that_stands_still_holds_nobody_up_but_more_is_not_taken(pipe):
    writer = Writer()

    def sink(data):
        write_all(pipe[1], data)

    size = FULL_BYTES // 8
    for _ in range(8):
        assert not writer.is_full()
        writer.write(sink, bytes(size))
    writer.write(sink, bytes(size))
    assert writer.is_full()
    assert not writer.drain(time.monotonic())
    read_exactly(pipe[0], size)
    assert writer.is_full()  # not enough room yet
    assert not select.select([writer.awake], [], [], 0)[0]
    read_exactly(pipe[0], 8 * size - ROOM_BYTES // 2)
    assert select.select([writer.awake], [], [], LIMIT_S)[0]
    writer.heard()
    assert not writer.is_full()
    read_exactly(pipe[0], ROOM_BYTES // 2)
    assert writer.drain(soon())


def test_a_reader_that_is_gone_is_an_error_at_a_later_call(pipe):
    os.close(pipe.pop(0))
    writer = Writer()
    writer.write(lambda data: write_all(pipe[0], data), b"a")
    assert writer.drain(soon())
    with pytest.raises(BrokenPipeError):
        writer.write(print, b"b")
    with pytest.raises(BrokenPipeError):
        writer.is_full()


def test_neighbours_are_written_in_one_piece():
    assert joined([(print, b"a"), (print, b"b"), (repr, b"c"), (print, b"d")]) == [
        (print, b"ab"),
        (repr, b"c"),
        (print, b"d"),
    ]
    many = joined([(print, bytes(PIECE_BYTES // 2))] * 5)
    assert [len(data) for _, data in many] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES // 2]


def test_each_rank_and_stream_has_a_file_also_where_there_are_many(tmp_path):
    ranks = OPEN_AT_ONCE + 2
    files = OutputDir(str(tmp_path / "new" / "folder"), ranks)
    for text in (b"first\n", b"second"):
        for rank in range(ranks):
            files.sink(rank, 1)(b"%d " % rank + text)
    files.sink(7, 2)(b"error\r")
    folder = tmp_path / "new" / "folder"
    assert (folder / "rank.007" / "stdout").read_bytes() == b"7 first\n7 second"
    assert (folder / "rank.007" / "stderr").read_bytes() == b"error\r"
    assert len(list(folder.iterdir())) == ranks
    assert files.failure is None


def test_a_folder_that_cannot_be_made_is_an_error_and_a_full_disk_is_remembered(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output-dir .*file: Not a directory"):
        OutputDir(str(tmp_path / "file"), 2)
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    files = OutputDir(str(tmp_path), 1)
    files.sink(0, 1)(b"more")
    assert files.failure is not None
    assert files.failure.errno == errno.ENOSPC
