"""Options in a file."""

import pytest
from click.core import ParameterSource

from hvdrun.command_line.cli import cli, main
from hvdrun.command_line.config_file import KEYS, read
from hvdrun.command_line.runtime_options import idle_notes, settings
from hvdrun.errors import UsageError
from hvdrun.knobs import MIB


@pytest.fixture
def written(tmp_path):
    """written(text): the option that names a file with that text."""

    def write(text):
        (tmp_path / "job.yaml").write_text(text)
        return ["--config-file", str(tmp_path / "job.yaml")]

    return write


def params(*words):
    return cli.make_context("hvdrun", [*words, "true"]).params


def set_by(*words):
    return settings(cli.params, params(*words))


# The form of Horovod's own files.
HOROVODS = """
controller: mpi

params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10.5
  cache_capacity: 2048
  hierarchical_allreduce: true

autotune:
  enabled: true
  log_file: 'autotune.txt'
  gaussian_process_noise: 0.9

timeline:
  filename: "time line.json"
  mark_cycles: true

stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240

library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2

logging:
  level: DEBUG
"""


def test_a_file_of_horovods_sets_the_knobs_and_says_what_has_no_effect(written):
    given = params(*written(HOROVODS))
    assert settings(cli.params, given) == {
        "HVDLITE_BUCKET_BYTES": str(32 * MIB),
        "HVDLITE_LOG_LEVEL": "DEBUG",
        "HVDLITE_STALL_CHECK_DISABLE": "1",
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "120",
        "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "HVDLITE_TIMELINE": "time line.json",
    }
    assert {note.partition(" ")[0] for note in idle_notes(cli.params, given)} == {
        *("--autotune", "--autotune-log-file", "--autotune-gaussian-process-noise"),
        *("--cycle-time-ms", "--cache-capacity", "--hierarchical-allreduce"),
        *("--timeline-mark-cycles", "--mpi-threads-disable", "--num-nccl-streams"),
    }


def test_any_option_of_hvdruns_may_stand_in_it(written):
    text = (
        "num-proc: 4\nhosts: ['server1:2', 'ann@server2:2']\nssh_port: 2222\nverbose: yes\n"
        "export: [A, B=x y]\nmpi_args: [--mca, a b, c]\ngpu: 0\ndeterministic: true\n"
    )
    given = params(*written(text))
    assert given["num_proc"] == 4
    assert given["hosts"] == "server1:2,ann@server2:2"
    assert given["ssh_port"] == 2222
    assert given["verbose"] is True
    assert given["export"] == ("A", "B=x y")
    assert given["mpi_args"] == "--mca 'a b' c"
    assert settings(cli.params, given) == {"HVDLITE_GPU": "0", "HVDLITE_DETERMINISTIC": "1"}


def test_an_empty_file_says_nothing(written):
    file = written("# nothing yet\n")
    assert params(*file) == {**params(), "config_file": file[1]}


def test_the_command_line_wins_wherever_it_stands(written):
    file = written("num_proc: 4\nmpi: mpich\nparams: {fusion_threshold_mb: 8}\n")
    for words in (["-np", "2", *file], [*file, "-np", "2"]):
        given = params(*words, "--fusion-threshold-mb", "1")
        assert (given["num_proc"], given["mpi"]) == (2, "mpich")
        assert settings(cli.params, given) == {"HVDLITE_BUCKET_BYTES": str(MIB)}


def test_the_command_line_wins_over_what_says_the_opposite(written):
    file = written("hostfile: /hosts\nstall_check: {enabled: false}\n")
    given = params(*file, "-H", "a:1", "--stall-check")
    assert (given["hosts"], given["hostfile"]) == ("a:1", None)
    assert settings(cli.params, given) == {"HVDLITE_STALL_CHECK_DISABLE": "0"}
    assert set_by(*file) == {"HVDLITE_STALL_CHECK_DISABLE": "1"}
    file = written("stall_check: {enabled: true}\n")
    assert set_by(*file, "--no-stall-check") == {"HVDLITE_STALL_CHECK_DISABLE": "1"}


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, keys in KEYS.items() for key in keys]
)
def test_every_key_of_every_section_is_an_option(section, key):
    ctx = cli.make_context("hvdrun", ["true"])
    for value in ("true", "7", "info"):
        try:
            found = read(f"{section}:\n  {key}: {value}\n", "job.yaml", ctx)
        except UsageError:
            continue
        (name,) = found
        assert ctx.get_parameter_source(name) is ParameterSource.DEFAULT
        return
    raise AssertionError(f"{section}.{key} takes no value")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("num_procs: 4", 1, "'num_procs' is not an option; did you mean 'num_proc'?"),
        ("\nstal_check: {}", 2, "'stal_check' is not an option; did you mean 'stall_check'?"),
        (
            "params:\n  cache_capacity: 1\n  fusion_treshold_mb: 3",
            3,
            "in section 'params'; did you mean 'fusion_threshold_mb'?",
        ),
        ("timeline:\n  zzz: 3", 2, "in section 'timeline'; the options are filename, mark_cycles"),
        ("num_proc: four", 1, "num_proc should be a whole number, not 'four'"),
        ("num_proc: 2.5", 1, "num_proc should be a whole number, not '2.5'"),
        ("num_proc: '4'", 1, "num_proc should be a whole number, not '4'"),
        ("num_proc: true", 1, "num_proc should be a whole number, not 'true'"),
        ("num_proc: 0", 1, "num_proc: 0 is not in the range 1<=x<=999999"),
        ("num_proc:", 1, "num_proc should be a whole number, not nothing"),
        ("verbose: 3", 1, "verbose should be true or false, not '3'"),
        ("params:\n  cycle_time_ms: often", 2, "cycle_time_ms should be a number, not 'often'"),
        ("hosts: {a: 1}", 1, "hosts should be a single text, not a section"),
        ("hostfile: [a]", 1, "hostfile should be a single text, not a list"),
        ("export: A", 1, "export should be a list, as in [a, b], not 'A'"),
        ("logging: {level: loud}", 1, "expected one of trace, debug"),
        ("mpi: lam", 1, "mpi: 'lam' is not one of"),
        ("min_np: 2", 1, "there is no elastic training"),
        ("params: 3", 1, "params should have lines such as 'key: value', not '3'"),
        ("- a", 1, "the file should have lines such as 'key: value', not a list"),
        ("verbose: true\nverbose: false", 2, "verbose is given twice"),
        ("controller: gloo", 1, "controller should be mpi, the only one, not 'gloo'"),
        ("config_file: other", 1, "'config_file' is not an option"),
        ("a: b: c", 1, "this is not valid YAML: mapping values are not allowed here"),
        ("verbose: true\nhosts: [a\n", 3, "this is not valid YAML: "),
        ("verbose: true\nhosts: \x01", 2, "this is not valid YAML: it has the character U+0001"),
        ("num_proc: " + "[" * 5000, 1, "are nested too deeply"),
        ("hosts:\n- a:1\n- b: 4", 3, "an entry of hosts should be a single text, not a section"),
        ("export: [A, ~]", 1, "an entry of export should be a single text, not nothing"),
        (r'export: ["A=\0"]', 1, "an entry of export contains a NUL character"),
        (r'hostfile: "a\0b"', 1, "hostfile contains a NUL character"),
    ],
)
def test_a_mistake_is_an_error_with_file_and_line(written, capsys, text, line, message):
    option, path = written(text)
    assert main([option, path, "true"]) == 64
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith(f"hvdrun: {path}:{line}: ")
    assert message in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts: a:1;b:1", "1: hosts, entry 1 ('a:1;b:1'): put nothing but a comma"),
        ("\nhosts: [a:1, 'b:$(id)']", "2: hosts, entry 2 ('b:$(id)'): the slots must be"),
        ("hosts: []", "1: hosts, entry 1 (''): it is empty"),
    ],
)
def test_a_mistake_in_a_host_list_is_said_with_the_place_in_the_file(written, capsys, text, said):
    option, path = written(text)
    assert main([option, path, "true"]) == 65
    assert capsys.readouterr().err.startswith(f"hvdrun: {path}:{said}")


def test_a_key_that_is_like_no_other_is_answered_with_each_key_once(written, capsys):
    assert main([*written("zzz: 1"), "true"]) == 64
    listed = capsys.readouterr().err.strip().partition("there are ")[2].split(", ")
    assert listed == sorted(set(listed))


def test_a_file_that_is_not_there_is_an_error(capsys):
    assert main(["--config-file", "/no/such", "true"]) == 64
    assert "--config-file /no/such: No such file or directory" in capsys.readouterr().err


def test_a_dry_run_shows_what_the_file_says(written, capsys):
    file = written("num_proc: 3\nparams: {fusion_threshold_mb: 2}\ndry_run: true\n")
    assert main([*file, "true"]) == 0
    shown = capsys.readouterr().out
    assert "-np 3 " in shown
    assert f"HVDLITE_BUCKET_BYTES={2 * MIB}" in shown
