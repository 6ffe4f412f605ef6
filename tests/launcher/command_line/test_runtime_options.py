"""The options of hvdrun that are the runtime's."""

import pytest

from hvdrun.command_line.cli import cli, main
from hvdrun.command_line.runtime_options import ELASTIC, WITHOUT_EFFECT, idle_notes, settings
from hvdrun.knobs import KNOBS, MIB

SAMPLES = {"int": "7", "float": "0.5", "text": "word"}


ON = {"HVDLITE_DETERMINISTIC": "1"}


def params(*words):
    return cli.make_context("hvdrun", [*words, "true"]).params


def set_by(*words):
    return settings(cli.params, params(*words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--gloo --use-gloo --use-mpi --communication gloo", {}),
        ("--fusion-threshold-mb 25", {"HVDLITE_BUCKET_BYTES": str(25 * MIB)}),
        ("--fusion-threshold-mb 0", {"HVDLITE_BUCKET_BYTES": "0"}),
        ("--no-stall-check", {"HVDLITE_STALL_CHECK_DISABLE": "1"}),
        ("--stall-check", {"HVDLITE_STALL_CHECK_DISABLE": "0"}),
        (
            "--stall-check-warning-time-seconds 5 --stall-check-shutdown-time-seconds=9",
            {"HVDLITE_STALL_CHECK_TIME_SECONDS": "5", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "9"},
        ),
        ("--timeline-filename run.json", {"HVDLITE_TIMELINE": "run.json"}),
        ("--log-level DEBUG", {"HVDLITE_LOG_LEVEL": "DEBUG"}),
        ("--deterministic --gpu none", {"HVDLITE_DETERMINISTIC": "1", "HVDLITE_GPU": "none"}),
        ("--gpu-collectives staged", {"HVDLITE_GPU_COLLECTIVES": "staged"}),
    ],
)
def test_an_option_sets_the_variable_of_its_knob(words, expected):
    assert set_by(*words.split()) == expected


@pytest.mark.parametrize("knob", [knob for knob in KNOBS if knob.flag], ids=lambda knob: knob.name)
def test_what_an_option_sets_the_runtime_can_read(knob):
    value = () if knob.kind == "bool" else (knob.choices or (SAMPLES[knob.kind],))[:1]
    (text,) = set_by(knob.flag, *value).values()
    wanted = {"bool": True, "int": 7 * knob.unit, "text": "".join(value)}[knob.kind]
    assert knob.parse(text) == wanted


@pytest.mark.parametrize(("flag", "variable", "takes", "why"), WITHOUT_EFFECT)
def test_an_option_without_effect_is_taken_and_says_so(flag, variable, takes, why):
    given = params(flag, *([SAMPLES[takes]] if takes else []))
    assert idle_notes(cli.params, given) == (f"{flag} has no effect: {why}",)
    assert settings(cli.params, given) == {}


@pytest.mark.parametrize(
    ("spelling", "num_values"), [(name, count) for names, count in ELASTIC for name in names]
)
def test_an_option_of_elastic_training_is_refused_with_the_reason(spelling, num_values, capsys):
    assert main(["-np", "2", spelling, *["7"] * num_values, "--dry-run", "true"]) == 64
    said = capsys.readouterr().err
    assert said.startswith("hvdrun: ")
    assert said.count("\n") == 1
    assert spelling in said
    assert "there is no elastic training" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fusion-threshold-mb -1", "--fusion-threshold-mb"),
        ("--fusion-threshold-mb 1048577", "1048577 is not in the range 0<=x<=1048576"),
        ("--stall-check-warning-time-seconds 18446744073709551616", "0<=x<=2147483647"),
        ("--stall-check-shutdown-time-seconds nan", "'nan'"),
        ("--fusion-threshold-mb much", "'much'"),
        ("--log-level loud", "one of trace, debug"),
        ("--cycle-time-ms often", "'often'"),
        ("--timeline-filename", "--timeline-filename"),
    ],
)
def test_a_value_that_cannot_be_is_a_usage_error(words, message, capsys):
    assert main([*words.split(), *(["true"] if " " in words else [])]) == 64
    assert message in capsys.readouterr().err


def test_a_dry_run_shows_what_the_options_set_and_the_ranks_get_it(capsys, monkeypatch):
    monkeypatch.setenv("HVDLITE_TIMELINE", "of the environment")
    words = "-np 2 --timeline-filename of-the-option --fusion-threshold-mb 3 --dry-run true"
    assert main(words.split()) == 0
    shown = capsys.readouterr().out
    assert "HVDLITE_TIMELINE=of-the-option" in shown
    assert f"HVDLITE_BUCKET_BYTES={3 * MIB}" in shown
    passed = next(line for line in shown.splitlines() if line.startswith("# variables"))
    assert passed.count("HVDLITE_TIMELINE") == 1
    assert "HVDLITE_BUCKET_BYTES" in passed


def test_the_help_lists_the_knobs_and_what_is_without_effect(capsys):
    assert main(["--help"]) == 0
    words = capsys.readouterr().out.split()
    for flag in [knob.flag for knob in KNOBS if knob.flag] + [row[0] for row in WITHOUT_EFFECT]:
        assert flag in words


READ = (
    "import os, hvdlite as hvd; from hvdlite.world import world; hvd.init();"
    "c = world.current().config;"
    "print(c.bucket_bytes, c.stall_check_time_seconds, c.deterministic)"
)


@pytest.mark.wide_in("mpich")
def test_every_rank_reads_what_the_options_say(hvdrun, python):
    options = "--fusion-threshold-mb 2 --stall-check-warning-time-seconds 77 --deterministic"
    finished = hvdrun("-np", "2", *options.split(), "--cache-capacity", "9", python, "-c", READ)
    assert finished.code == 0, finished
    for rank in (0, 1):
        assert finished.of_rank(rank).stdout.split() == [str(2 * MIB), "77", "True"]
    assert finished.stderr.count("hvdrun: --cache-capacity has no effect: ") == 1


@pytest.mark.parametrize(
    ("inherited", "set_for_the_ranks"),
    [("virtual:8", {}), (" Virtual:8 ", {}), ("0", ON), ("1", ON), ("", ON), ("virtually", ON)],
)
def test_a_flag_keeps_what_the_environment_says_beyond_it(inherited, set_for_the_ranks):
    environ = {"HVDLITE_DETERMINISTIC": inherited}
    assert settings(cli.params, params("--deterministic"), environ) == set_for_the_ranks
