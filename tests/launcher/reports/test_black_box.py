"""Reading a rank's black box, whatever the rank has written there."""

import json
import os
import struct
import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.agent.rank.notes import FEW, RankBox
from hvdrun.machine.notes import (
    ENTRIES,
    ENTRY_BYTES,
    HEAD_BYTES,
    LARGEST_BYTES,
    LINES_AT,
    LINES_BYTES,
    pack_lines,
)
from hvdrun.reports.black_box import lines_of, read_box

HEAD = {"format": 3, "kinds": ["allreduce", "barrier"], "to_wall_ns": 5000}


def entry(ticket, name=b"x", kind=0, posted=10**9, in_words=False):
    words = (ticket, 1, posted, 0, 0, 0, 12, 2, 3, 4, 5, -1, kind, 0, in_words, name)
    return struct.pack("=QQQQQQQIIIIiBBBx112s", *words)


def packed(head=None, *entries, lines=b""):
    text = json.dumps(HEAD if head is None else head).encode()
    return zlib.compress(b"\0".join((text, lines, b"".join(entries))))


@pytest.fixture
def kept():
    """kept(content): what the keeper reads of a memory with that content."""
    boxes = []

    def read(content, all_of_them=True):
        fd = os.memfd_create("box", os.MFD_ALLOW_SEALING)
        os.write(fd, content)
        boxes.append(RankBox())
        boxes[-1].keep(fd)
        read.box = boxes[-1]
        return boxes[-1].read(all_of_them)

    yield read
    for box in boxes:
        os.close(box.fd)


def test_entries_are_read_in_their_order_and_one_that_is_being_written_is_left_out(kept):
    head = json.dumps(HEAD).encode().ljust(HEAD_BYTES, b"\0")
    whole = head + entry(9, b"c") + entry(0, b"torn") + entry(7, b"a") + entry(8, b"b")
    box = read_box(kept(whole + entry(10, b"cut off")[:-1]))
    assert [each.name for each in box.operations] == ["a", "b", "c"]
    assert [each.number for each in box.operations] == [7, 8, 9]
    row = json.loads(next(lines_of(box)))
    assert (row["kind"], row["posted"], row["matched"]) == ("allreduce", 1.000005, None)


def with_lines(block, posted=0):
    head = json.dumps(HEAD).encode().ljust(LINES_AT, b"\0") + block
    return head.ljust(HEAD_BYTES, b"\0") + entry(7, posted=posted)


def test_the_lines_from_which_the_script_waited_last_are_read(kept):
    lines = ['  File "/a b/train.py", line 12 in main', '  File "/t\x1b.py", line 3 in <module>']
    box = read_box(kept(with_lines(pack_lines(lines, 0, zlib.crc32))))
    assert box.waited_at == (("/a b/train.py", 12, "main"), ("/t?.py", 3, "<module>"))
    assert [each.number for each in box.operations] == [7]


@pytest.mark.parametrize(("since", "are_kept"), [(0, True), (1, True), (2, False)])
def test_lines_since_which_several_operations_have_begun_are_left_out(kept, since, are_kept):
    content = with_lines(pack_lines(['  File "a.py", line 1 in main'], 50, zlib.crc32), posted=50)
    later = b"".join(entry(8 + n, posted=51) for n in range(since))
    assert bool(read_box(kept(content + later)).waited_at) == are_kept
    assert bool(kept.box.lines()) == are_kept


@pytest.mark.parametrize("cut", [0, 3, 4, 30, LINES_BYTES - 1])
def test_lines_that_were_being_written_are_left_out(kept, cut):
    old, new = (
        pack_lines([f'  File "/{name}.py", line {line} in main'], 0, zlib.crc32)
        for name, line in (("new" * 9, 1), ("old", 22))
    )
    torn = new[:cut] + b"\xff" + old[cut + 1 :]
    box = read_box(kept(with_lines(torn)))
    assert (box.waited_at, len(box.operations)) == ((), 1)


def test_of_lines_that_are_too_long_the_first_ones_are_kept():
    lines = [f'  File "/{"x" * 300}", line {n} in main' for n in range(5)]
    block = pack_lines(lines, 0, zlib.crc32)
    assert len(block) == LINES_BYTES
    assert block.count(b"line") == 3
    assert pack_lines(["x" * 2000], 0, zlib.crc32).strip(b"\0") == zlib.crc32(
        bytes(LINES_BYTES - 4)
    ).to_bytes(4, "little").strip(b"\0")


def test_an_empty_memory_is_not_sent(kept):
    assert kept(b"") == kept(b"\0" * 70_000) == kept(b"short") == b""
    assert RankBox().read(True) == b""


@pytest.mark.parametrize("make", [os.pipe, lambda: (os.open("/proc/self/maps", os.O_RDONLY),)])
def test_what_is_no_memory_is_closed_and_not_read(make):
    box = RankBox()
    fds = make()
    box.keep(fds[0])
    assert box.fd is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])
    for fd in fds[1:]:
        os.close(fd)


def test_a_later_memory_takes_the_place_of_an_earlier_one():
    box = RankBox()
    first, second = (os.memfd_create("box") for _ in range(2))
    box.keep(first)
    box.keep(second)
    assert box.fd == second
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    os.close(second)


def test_the_names_and_kinds_can_not_deceive_a_terminal():
    head = {**HEAD, "kinds": ["all\x1b[2Jreduce" + "x" * 1000]}
    box = read_box(
        packed(head, entry(1, b"\x1b]0;title\x07\nhvdrun: ok"), entry(2, b"\xff\xfe", 9))
    )
    first, second = box.operations
    assert first.title.isprintable()
    assert first.name == "?]0;title??hvdrun: ok"
    assert len(first.kind) == 32
    assert second.title == "operation 9 '��'"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        packed()[:-5][:10],
        packed([]),
        packed({}),
        packed({**HEAD, "format": 1}),
        packed({**HEAD, "kinds": 1}),
        packed({**HEAD, "to_wall_ns": 1e400}),
        packed({**HEAD, "to_wall_ns": 1 << 70}),
        zlib.compress(b"no text"),
        zlib.compress(b"[" * 4000 + b"\0"),
    ],
)
def test_what_is_no_black_box_is_none(data):
    assert read_box(data) is None


def test_an_operation_has_the_title_that_the_core_gives_it():
    entries = [
        entry(1, b"loss"),
        entry(2, b"unnamed.3 of thread 1", kind=1),
        entry(3, b"the start of an update", in_words=True),
        entry(4, b"hvdlite.load_state_dict.end"),
    ]
    titles = [each.title for each in read_box(packed(None, *entries)).operations]
    assert titles == [
        "allreduce 'loss'",
        "an unnamed barrier (no. 3 of thread 1)",
        "the start of an update",
        "the allreduce in load_state_dict",
    ]


def test_a_small_message_can_not_become_a_large_one():
    bomb = zlib.compress(json.dumps(HEAD).encode() + b"\0\0" + entry(1) * 3_000_000)
    assert len(read_box(bomb).operations) == 1
    many = packed(None, *(entry(number) for number in range(1, 3 * ENTRIES)))
    assert len(read_box(many).operations) <= ENTRIES + HEAD_BYTES // ENTRY_BYTES


def test_the_last_ones_can_be_read_alone():
    data = packed(None, *(entry(number) for number in (3, 1, 4, 2)))
    assert [each.number for each in read_box(data, 2).operations] == [3, 4]
    assert [each.number for each in read_box(data, 9).operations] == [1, 2, 3, 4]


@given(st.binary(max_size=4 * ENTRY_BYTES), st.binary(max_size=100))
def test_any_bytes_for_entries_give_operations_and_lines(rest, lines):
    lines = lines.replace(b"\0", b"")
    box = read_box(packed(None, rest, lines=lines))
    assert read_box(packed(None, rest, lines=b'  File "x", line 3 in y\n' + lines)).waited_at
    assert len(box.operations) <= len(rest) // ENTRY_BYTES
    for line in lines_of(box):
        assert line.isprintable()
        json.loads(line)


@given(st.binary(max_size=200))
def test_any_message_is_read_to_its_end(data):
    read_box(data)
    read_box(zlib.compress(data))


READS = """
import os, sys
from hvdrun.agent.rank.notes import RankBox
from hvdrun.machine import looks
box = RankBox()
fd = os.memfd_create("box", os.MFD_ALLOW_SEALING)
os.write(fd, os.urandom(69632))
box.keep(fd)
before = set(sys.modules)
assert box.read(True)
assert looks._read_in_time(os.getpid(), "stat")
print(sorted(set(sys.modules) - before - set(sys.builtin_module_names)))
"""


def test_at_a_ranks_end_and_while_something_hangs_no_module_is_read_from_a_disk():
    done = subprocess.run(
        [sys.executable, "-I", "-c", READS], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_largest_memory_fits_into_the_largest_message(kept):
    noise = os.urandom(HEAD_BYTES + ENTRIES * ENTRY_BYTES + 1000)
    assert len(kept(noise)) <= LARGEST_BYTES
    assert len(zlib.decompress(kept(noise, False))) <= HEAD_BYTES + 1 + FEW * ENTRY_BYTES
