"""What a rank sends of its progress."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.machine import notes
from hvdrun.pulse import (
    LONGEST,
    LONGEST_NAME,
    MOST_PER_S,
    MOST_VALUES,
    Pulse,
    encode,
    every_s,
    parse,
)

numbers = st.floats(0, 1e9).map(lambda number: round(number, 6))
names = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=32)
floats = st.floats(allow_nan=False).map(lambda number: float(f"{number:.6g}"))
pulses = st.builds(
    Pulse,
    *[numbers] * 5,
    st.none() | st.integers(0, 10**9).map(float),
    st.dictionaries(names, floats, max_size=MOST_VALUES),
    numbers,
    numbers,
)


@given(pulses)
def test_a_pulse_arrives_as_it_was(pulse):
    assert parse(encode(pulse)) == pulse


def test_a_loss_that_is_no_number_arrives_too():
    assert math.isnan(parse(encode(Pulse(*[1] * 5, values={"loss": math.nan}))).values["loss"])


def test_the_longest_one_fits_into_a_note():
    quotes = '"' * (LONGEST_NAME - 1)  # two bytes each in JSON
    values = {f"{number}{quotes}": -1.23456e-300 for number in range(MOST_VALUES)}
    longest = Pulse(
        *[999_999_999_999.123456] * 5, 999_999_999_999.0, values, *[999_999_999_999.0] * 2
    )
    assert len(encode(longest)) <= LONGEST == notes.KINDS[notes.PULSE]
    assert parse(encode(longest))


WRONG: list[dict[str, object]] = [
    {"at": None},
    {"steps": -1},
    {"seconds": math.inf},
    {"waited": math.nan},
    {"data": "x"},
    {"step": -1},
    {"step": math.nan},
    {"step": []},
    {"values": 1},
    {"values": {"loss": "x"}},
    {"values": {"loss": None}},
    {"values": {"": 1}},
    {"values": {"\x1b[2J": 1}},
    {"values": {"x" * (LONGEST_NAME + 1): 1}},
    {"values": {str(number): 1 for number in range(MOST_VALUES + 1)}},
    {"values": {"loss": 10**400}},
]
SOUND: dict[str, object] = {"at": 1, "steps": 1, "seconds": 1, "waited": 1, "data": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b"null",
        b"[" * 900,
        *(json.dumps(SOUND | more).encode() for more in WRONG),
    ],
)
def test_what_is_no_pulse_is_dropped(data):
    assert parse(data) is None
    assert parse(json.dumps(SOUND).encode()) == Pulse(1, 1, 1, 1, 1)


@pytest.mark.parametrize("size", [1, 400, 401, 10_000])
def test_hvdrun_gets_no_more_of_them_however_many_ranks_there_are(size):
    assert size / every_s(size) <= MOST_PER_S
    assert every_s(400) == 2
