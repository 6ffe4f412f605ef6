"""The knobs, the environment, and what is read from it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.config import Config
from hvdlite.errors import ConfigError
from hvdrun.knobs import ELASTIC, KNOBS, WITHOUT_EFFECT

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
        ("HVDLITE_HOST_RANKS", "2, 1", "host_ranks", (2, 1)),
        ("HVDLITE_GPU", "none", "gpu", "none"),
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
        ("HOROVOD_FUSION_THRESHOLD", "-1", "at least 0"),
        ("HVDLITE_BLOCK_BYTES", "0", "at least 64"),
        ("HVDLITE_PIECE_BYTES", "63", "at least 64"),
        ("HVDLITE_DETERMINISTIC", "maybe", "1 or 0"),
        ("HVDLITE_HOST_RANKS", "2,x", "whole number"),
        ("HVDLITE_HOST_RANKS", "2,0", "at least 1"),
        ("HVDLITE_LOG_LEVEL", "loud", "one of trace, debug"),
    ],
)
def test_a_value_that_cannot_be_parsed_is_an_error_that_names_the_variable(
    variable, text, expected
):
    with pytest.raises(ConfigError, match=f"{variable}=.*{expected}"):
        Config.from_env({variable: text})


@given(st.sampled_from(KNOBS), st.text())
def test_any_text_is_a_value_of_the_right_type_or_a_named_error(knob, text):
    try:
        value = getattr(Config.from_env({knob.variable: text}), knob.name)
    except ConfigError as error:
        assert knob.variable in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert type(value) is type(knob.default)
