"""What a rank sends of its steps."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.machine import notes
from hvdrun.records import (
    LONGEST,
    MOST_LINKS,
    MOST_RECENT,
    MOST_SAMPLES,
    Connection,
    Record,
    Sample,
    encode,
    of_world,
    parse,
)

single = st.floats(0, 1e6, width=32)
numbers = st.floats(0, 1e9).map(lambda number: round(number, 6))
whole = st.integers(0, 2**32 - 1)


def samples(most):
    return st.lists(st.builds(Sample, whole, single, single, single), max_size=most).map(tuple)


counts = st.integers(0, 2**53)
sent = st.lists(st.tuples(whole, counts), max_size=MOST_LINKS).map(tuple)
connections = st.lists(
    st.builds(Connection, *[st.ip_addresses().map(str)] * 2, counts, numbers, whole),
    max_size=MOST_LINKS,
).map(tuple)
links = {"sent": sent, "connections": connections}
recent = st.builds(Record, *[numbers] * 8, samples=samples(MOST_RECENT), recent=st.none(), **links)
measured = st.builds(
    Record, *[numbers] * 8, samples=samples(MOST_SAMPLES), recent=st.none() | recent, **links
)
names = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=100)
records = st.builds(of_world, measured, optimizer=names, members=whole, rank=whole, size=whole)


@given(records, names, whole)
def test_a_record_arrives_as_it_was(record, name, members):
    assert parse(encode(record)) == record
    if record.recent:  # of another optimizer
        recent = record.recent._replace(optimizer=name, members=members)
        record = record._replace(recent=recent)
        assert parse(encode(record)) == record


def test_the_longest_one_fits_into_a_note():
    sample = Sample(2**32 - 1, *[struct.unpack("<f", b"\xff\xff\x7f\x47")[0]] * 3)
    name = "x" * 1000
    numbers = [999_999_999_999.0] * 8
    links = {
        "sent": ((999_999, 10**17),) * 1000,
        "connections": (Connection("f" * 39, "f" * 39, 10**17, numbers[0], 10**12 - 1),) * 1000,
    }
    recent = Record(*numbers, 1000 * "y", 2**32, samples=(sample,) * 1000, **links)
    longest = Record(*numbers, name, *[2**32] * 3, samples=(sample,) * 1000, recent=recent, **links)
    assert len(encode(longest)) <= LONGEST == notes.KINDS[notes.SUMMARY]
    assert parse(encode(longest))


SHORT = {"steps": 1, "seconds": 1, "waited": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b"null",
        b'{"steps": "x", "seconds": 1, "waited": 1}',
        b'{"steps": NaN, "seconds": 1, "waited": 1}',
        b'{"steps": 1e300, "seconds": 1, "waited": 1}',
        b'{"steps": -1, "seconds": 1, "waited": 1}',
        b'{"steps": [], "seconds": 1, "waited": 1}',
        *(
            json.dumps(SHORT | given).encode()
            for given in (
                {"cpu": None},
                {"rank": -1},
                {"size": "x"},
                {"samples": 1},
                {"sent": [[0, -1]]},
                {"sent": [[0, 1]] * (MOST_LINKS + 1)},
                {"connections": [["a", "b", 1, 1]]},
                {"connections": [["a", "b", 1, "NaN", 1]]},
                {"connections": [["a", "b", 1, 1, -1]]},
                {"connections": [["a", "b", 1, 1, 1]] * (MOST_LINKS + 1)},
                {"samples": "?"},
                {"samples": "AAAA"},
                {"samples": "AAAAAAAAwH8AAAAAAAAAAA=="},  # not a number
                {"samples": "A" * 4 * (MOST_SAMPLES + 3) * 4},
                {"recent": 1},
                {"recent": {"steps": 1}},
                {"recent": SHORT | {"steps": -1}},
                {"recent": SHORT | {"samples": "A" * 4 * (MOST_RECENT + 3) * 4}},
            )
        ),
        b"[" * 900,
    ],
)
def test_what_is_no_record_is_dropped(data):
    assert parse(data) is None
    assert parse(json.dumps(SHORT).encode()) == Record(1, 1, 1)
