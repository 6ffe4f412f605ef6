"""What hvdrun refuses before anything starts: wrong values of knobs, and too many servers."""

import re
from dataclasses import replace

import pytest

from hvdlite.errors import ConfigError
from hvdlite.world.config import Config
from hvdlite.world.virtual_ranks import micro_batches
from hvdrun.command_line.cli import main
from hvdrun.errors import UsageError
from hvdrun.plan.checks import check_counted_knobs, check_servers
from hvdrun.plan.request import Request
from tests.launcher.plan.test_command import FACTS

CHECK, TREE = "HVDLITE_CHECK_PARAMETERS", "HVDLITE_DETERMINISTIC"


def checked(how, variable, text, num_proc=2):
    request, environ = Request((), settings={variable: text}), {variable: "1"}
    if how == "-x NAME=VALUE":
        request = Request((), exports={variable: text})
    elif how != "an option":
        request = Request((), exports={variable: None} if how == "-x NAME" else {})
        environ = {variable: text}
    return warning(request, num_proc, environ)


def warning(request, num_proc, environ):
    return check_counted_knobs(replace(request, num_proc=num_proc), replace(FACTS, environ=environ))


WAYS = pytest.mark.parametrize("how", ["an option", "-x NAME=VALUE", "-x NAME", "inherited"])
WRONG = pytest.mark.parametrize(
    ("variable", "text"),
    [
        (CHECK, ""),
        (CHECK, "often"),
        (CHECK, "-1"),
        (CHECK, "2147483648"),
        (CHECK, "repairs:7"),
        (CHECK, "repair:"),
        (CHECK, "repair:\udcff" + "7" * 100),
        (TREE, "maybe"),
        (TREE, "virtual"),
        (TREE, "virtual:6"),
        (TREE, "virtual:65536"),
    ],
)


@WAYS
@WRONG
def test_a_wrong_text_is_refused_in_the_words_of_the_ranks(how, variable, text):
    with pytest.raises(ConfigError) as of_rank:
        Config.from_env({variable: text})
    with pytest.raises(UsageError, match=re.escape(str(of_rank.value))):
        checked(how, variable, text)


@WAYS
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        *((CHECK, text) for text in ("0", " 007 ", "repair", "Repair: 7")),
        *((TREE, text) for text in ("", "on", "0", "virtual:2", " Virtual: 8 ")),
    ],
)
def test_a_text_that_the_ranks_read_is_accepted_without_a_word(how, variable, text):
    Config.from_env({variable: text})
    assert checked(how, variable, text) == ""


@WAYS
def test_ranks_that_cannot_share_the_virtual_ranks_are_a_warning_in_the_words_of_the_ranks(how):
    config = Config.from_env({TREE: "virtual:8"})
    with pytest.raises(ValueError, match="3 ranks can't have the same number of the 8 ") as of_rank:
        micro_batches(config, 3)
    assert checked(how, TREE, "virtual:8", num_proc=3) == str(of_rank.value)


def test_servers_have_no_virtual_ranks():
    environ = {TREE: "virtual:8", "HVDLITE_SERVERS": "1"}
    assert warning(Request(()), 3, environ) == ""
    text = warning(Request(()), 4, environ)
    assert " 3 ranks can't " in text
    assert text.endswith("1, 2, 4, 8 (1 of the 4 processes is a server)")
    assert warning(Request(()), 3, environ | {"HVDLITE_SERVERS": " 1 "}) == ""
    assert " 3 ranks can't " in warning(Request(()), 3, environ | {"HVDLITE_SERVERS": "9" * 5000})


def test_an_option_counts_before_x():
    exports = {TREE: "maybe"}
    warning(Request((), exports=exports, settings={TREE: "1"}), 2, {})


EXPECTED = f"hvdrun: {TREE}='virtual:6': expected 1 or 0, or virtual:N with a power of two N up to"


@pytest.mark.parametrize("how", ["-x", "the config file", "inherited", "inherited, with a flag"])
def test_hvdrun_ends_with_64_and_starts_nothing(how, tmp_path, capfd, monkeypatch):
    text = f"{TREE}=virtual:6"
    options = {"-x": ["-x", text], "inherited, with a flag": ["--deterministic"]}.get(how, [])
    if how == "the config file":
        (tmp_path / "job.yaml").write_text(f"export: ['{text}']\n")
        options = ["--config-file", str(tmp_path / "job.yaml")]
    elif how.startswith("inherited"):
        monkeypatch.setenv(TREE, "virtual:6")
    started = tmp_path / "started"
    assert main(["-np", "2", *options, "touch", str(started)]) == 64
    assert EXPECTED in capfd.readouterr().err
    assert not started.exists()


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_no_host_is_asked_before_a_wrong_text_is_refused(options, capfd):
    far = ["-H", "no-such-host.invalid:2", "-x", f"{TREE}=virtual:6", *options]
    assert main([*far, "true"]) == 64
    assert EXPECTED in capfd.readouterr().err


def test_a_dry_run_shows_the_warning(capfd):
    assert main(["-np", "3", "-x", f"{TREE}=virtual:8", "--dry-run", "true"]) == 0
    assert f"# {TREE}=virtual:8: 3 ranks can't" in capfd.readouterr().out


def test_hvdrun_warns_once_and_starts_the_job(hvdrun):
    done = hvdrun("-np", "3", "-x", f"{TREE}=virtual:8", "true")
    assert done.code == 0, done
    said = f"hvdrun: {TREE}=virtual:8: 3 ranks can't have the same number of the 8 virtual ranks; "
    assert done.stderr.count(said + "start one of these numbers: 1, 2, 4, 8\n") == 1, done


OPTION = {"HVDLITE_SERVERS": "2"}


def check_number(request, num_proc, environ):
    check_servers(replace(request, num_proc=num_proc), replace(FACTS, environ=environ))


@pytest.mark.parametrize(
    ("request_", "environ"),
    [
        (Request((), settings=OPTION), {}),
        (Request((), exports={"HVDLITE_SERVERS": "2"}), {}),
        (Request(()), {"HVDLITE_SERVERS": "2"}),
    ],
)
def test_servers_leave_at_least_one_worker(request_, environ):
    check_number(request_, 3, environ)
    check_number(request_, None, environ)
    with pytest.raises(UsageError, match="2: the job has 2 processes, servers included"):
        check_number(request_, 2, environ)


def test_an_option_counts_before_a_variable():
    check_number(Request((), settings=OPTION), 3, {"HVDLITE_SERVERS": "3"})


def test_what_is_no_number_is_left_to_the_ranks():
    check_number(Request(()), 1, {"HVDLITE_SERVERS": "some"})
    check_number(Request(()), 1, {})
