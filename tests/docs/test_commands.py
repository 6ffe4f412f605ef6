"""The command lines of the pages are such as hvdrun and make understand."""

import re
import shlex
import subprocess

import pytest

from hvdrun.command_line.cli import cli
from hvdrun.command_line.spellings import FOREIGN
from tests.docs.pages import PAGES, commands
from tests.harness.worlds import ROOT


def words_of(line):
    """Those after `hvdrun`, as a shell would pass them on."""
    quoted = line[re.search(r"\bhvdrun ", line).end() :]
    shown = subprocess.run(
        ["sh", "-c", f"set -- {quoted}; printf '%s\\0' \"$@\""],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return shown.split("\0")[:-1]


def hvdruns(page):
    lines = [line for line in commands(page) if re.match(r"(\w+=\S+ )*hvdrun ", line)]
    return lines + re.findall(r"^(?:docker|apptainer).*?(hvdrun .*)$", PAGES[page], re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if hvdruns(page)])
def test_every_command_of_a_page_is_one_that_hvdrun_understands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in hvdruns(page):
        words = words_of(line)
        context = cli.make_context("hvdrun", words)
        instead = {"--check", "--check-build", "--metrics", "--stacks"}
        assert context.params["command"] or instead & set(words)


# Of docker, pip, slurm, gdb, mpirun, and of other launchers that hvdrun answers.
OTHERS = {
    *("--shm-size", "--ipc", "--user", "--cpus", "--cpuset-cpus", "--gpus", "--pids-limit"),
    *("--ntasks", "--ntasks-per-node", "--nodes", "--cpus-per-task", "--exclusive"),
    *("--prtemca", "--cap-add"),
    *("--np", *(f"--{name}" for name in FOREIGN)),
}


def options_in(page):
    """The options that the page names; those about the project name other programs' options too."""
    if page.startswith(("docs/design/", "docs/benchmarks", "CONTRIBUTING", "CHANGELOG")):
        return set()
    code = re.findall(r"`([^`\n]+)`", PAGES[page])
    named = {part for span in code if span.startswith("--") for part in span.split()[:1]}
    return {name.partition("=")[0] for name in named} - OTHERS


@pytest.mark.parametrize("page", [page for page in PAGES if options_in(page)])
def test_every_option_that_a_page_names_is_one_of_hvdruns(page):
    known = {"--help", *(name for option in cli.params for name in option.opts)}
    assert options_in(page) <= known


@pytest.mark.parametrize("page", PAGES)
def test_every_target_of_make_that_a_page_names_is_there(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [*commands(page), *re.findall(r"`(make [^`\n]+)`", PAGES[page])]
    for line in lines:
        words = shlex.split(line.replace("…", ""), comments=True)
        if words[:1] == ["make"]:
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= targets, line
