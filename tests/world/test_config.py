"""The knobs, and how they are read from the environment."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.errors import ConfigError
from hvdlite.world.config import Config
from hvdrun.command_line.runtime_options import ELASTIC, WITHOUT_EFFECT
from hvdrun.knobs import KNOBS

BY_NAME = {knob.name: knob for knob in KNOBS}


def test_every_knob_is_a_field_and_every_field_a_knob():
    assert {field.name for field in dataclasses.fields(Config)} == set(BY_NAME)


def test_the_table_is_sorted_and_no_name_or_flag_stands_twice():
    assert [knob.name for knob in KNOBS] == sorted(BY_NAME)
    flags = [flag for knob in KNOBS for flag in (knob.flag, knob.off_flag) if flag]
    flags += [row[0] for row in WITHOUT_EFFECT] + [name for row in ELASTIC for name in row[0]]
    variables = [knob.horovod for knob in KNOBS if knob.horovod]
    variables += [row[1] for row in WITHOUT_EFFECT if row[1]]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)


def test_without_variables_the_defaults_hold():
    assert Config.from_env({}) == Config()


def test_a_default_has_the_type_of_its_kind():
    types = {"int": int, "bool": bool, "text": str, "counts": tuple}
    assert all(type(knob.default) is types[knob.kind] for knob in KNOBS)


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("HVDLITE_BUCKET_BYTES", "1048576", "bucket_bytes", 1048576),
        ("HOROVOD_FUSION_THRESHOLD", "0", "bucket_bytes", 0),
        ("HVDLITE_DETERMINISTIC", "1", "deterministic", True),
        ("HVDLITE_DETERMINISTIC", "False", "deterministic", False),
        ("HVDLITE_DETERMINISTIC", "Virtual: 8", "deterministic", "virtual:8"),
        ("HVDLITE_DETERMINISTIC", "virtual:8", "virtual_ranks", 8),
        ("HVDLITE_DETERMINISTIC", "1", "virtual_ranks", 0),
        ("HVDLITE_CHECK_PARAMETERS", "7", "steps_between_checks", 7),
        ("HVDLITE_CHECK_PARAMETERS", "7", "repairs_parameters", False),
        ("HVDLITE_CHECK_PARAMETERS", "Repair: 07", "check_parameters", "repair:7"),
        ("HVDLITE_CHECK_PARAMETERS", "repair:7", "steps_between_checks", 7),
        ("HVDLITE_CHECK_PARAMETERS", "repair:7", "repairs_parameters", True),
        ("HVDLITE_CHECK_PARAMETERS", "repair", "check_parameters", "repair:100"),
        ("HVDLITE_HOST_RANKS", "2, 1", "host_ranks", (2, 1)),
        ("HVDLITE_GPU", "none", "gpu", "none"),
        ("HVDLITE_GPU", "03", "gpu", "3"),
        ("HVDLITE_LOG_LEVEL", "INFO", "log_level", "info"),
        ("HOROVOD_LOG_LEVEL", "fatal", "log_level", "fatal"),
    ],
)
def test_a_variable_sets_its_field(variable, text, field, value):
    assert getattr(Config.from_env({variable: text}), field) == value


def test_horovods_name_counts_only_where_ours_is_not_set():
    environ = {"HVDLITE_BUCKET_BYTES": "7", "HOROVOD_FUSION_THRESHOLD": "8"}
    assert Config.from_env(environ).bucket_bytes == 7


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("HVDLITE_BUCKET_BYTES", "25MB", "whole number"),
        ("HVDLITE_BUCKET_BYTES", "", "whole number"),
        ("HOROVOD_FUSION_THRESHOLD", "-1", "a whole number from 0 to 1099511627776"),
        ("HVDLITE_BLOCK_BYTES", "0", "a whole number from 64 to 1073741824"),
        ("HVDLITE_BLOCK_BYTES", str(1 << 61), "a whole number from 64 to 1073741824"),
        ("HVDLITE_PIECE_BYTES", "63", "a whole number from 64 to"),
        ("HVDLITE_EVENT_LOG", "144115188075855872", "a whole number from 0 to 16777216"),
        ("HVDLITE_HOST_RANKS", "2,1025", "whole numbers from 1 to 1024"),
        ("HVDLITE_DETERMINISTIC", "maybe", "1 or 0"),
        ("HVDLITE_DETERMINISTIC", "virtual:6", "a power of two N up to 32768"),
        ("HVDLITE_DETERMINISTIC", "virtual:0", "a power of two"),
        ("HVDLITE_DETERMINISTIC", "virtual:65536", "a power of two"),
        ("HVDLITE_DETERMINISTIC", "virtual:two", "a power of two"),
        ("HVDLITE_STRICT", "virtual:4", "expected 1 or 0 "),
        ("HVDLITE_CHECK_PARAMETERS", "repairs:7", "or repair:N"),
        ("HVDLITE_CHECK_PARAMETERS", "repair:", "a whole number from 0 to 2147483647"),
        ("HVDLITE_CHECK_PARAMETERS", "repair:-1", "a whole number from 0 to 2147483647"),
        ("HVDLITE_HOST_RANKS", "2,x", "whole numbers from 1"),
        ("HVDLITE_HOST_RANKS", "2,0", "whole numbers from 1"),
        ("HVDLITE_LOG_LEVEL", "loud", "one of trace, debug"),
        ("HVDLITE_GPU", "first", "one of auto, none, or a whole number from 0 to 999"),
    ],
)
def test_a_value_that_cannot_be_parsed_is_an_error_that_names_the_variable(
    variable, text, expected
):
    with pytest.raises(ConfigError, match=f"{variable}=.*{expected}"):
        Config.from_env({variable: text})


NUMBERS = [knob for knob in KNOBS if knob.kind in ("int", "counts")]
VARIABLES = [
    pytest.param(knob, variable, id=variable)
    for knob in NUMBERS
    for variable in (knob.variable, knob.horovod)
    if variable
]


def value_of(knob, variable, text):
    return getattr(Config.from_env({variable: text}), knob.name)


@pytest.mark.parametrize(("knob", "variable"), VARIABLES)
def test_a_number_has_a_least_and_a_largest_value(knob, variable):
    assert 0 <= knob.minimum < knob.maximum < 2**62
    for number in (knob.minimum, knob.maximum):
        for text in (str(number), f" 00{number} "):
            assert value_of(knob, variable, text) in (number, (number,))


@pytest.mark.parametrize("knob", ["stall_check_time_seconds", "stall_shutdown_time_seconds"])
def test_the_largest_int_is_a_stall_time_as_scripts_use_it_for_never(knob):
    assert getattr(Config.from_env({f"HOROVOD_{knob.upper()}": str(2**31 - 1)}), knob) == 2**31 - 1


@pytest.mark.parametrize(("knob", "variable"), VARIABLES)
@pytest.mark.parametrize(
    "text",
    [
        *("-1", str(2**63 - 1), str(2**63), str(2**64), "-" + "9" * 9999, "9" * 9999, "nan"),
        *("inf", "-inf", "1e400", "1.5", "0x40", "1_000", "+64", "\u0661\u0660\u0660", "max+1"),
    ],
    ids=lambda text: text[:20],
)
def test_any_other_number_is_an_error_that_names_the_variable_the_value_and_the_range(
    knob, variable, text
):
    text = str(knob.maximum + 1) if text == "max+1" else text
    with pytest.raises(ConfigError) as caught:
        value_of(knob, variable, text)
    said = str(caught.value)
    assert said.startswith(f"{variable}={text[:64]!r}"[:-1])
    also = f", or {knob.counted}:N" if knob.counted else ""
    assert f" from {knob.minimum} to {knob.maximum}{also} (" in said
    assert len(said) < 400


@given(st.sampled_from(KNOBS), st.text())
def test_any_text_is_a_value_of_the_right_type_or_a_named_error(knob, text):
    try:
        value = getattr(Config.from_env({knob.variable: text}), knob.name)
    except ConfigError as error:
        assert knob.variable in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert type(value) is type(knob.default)
