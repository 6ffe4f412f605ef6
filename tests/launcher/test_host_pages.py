"""The examples on the pages about hosts, schedulers and the output of a job are true."""

import re
import shlex
import textwrap

import pytest

from hvdrun.command_line.cli import main
from hvdrun.errors import LaunchError
from hvdrun.plan.hosts import Host, parse_hostfile, parse_hosts
from tests.harness.worlds import ROOT

NAMES = (
    *("how-to/debugging", "how-to/profiling", "launching/slurm"),
    *("reference/hosts", "reference/preflight", "reference/supervision"),
)
PAGES = {name.rpartition("/")[2]: (ROOT / f"docs/{name}.md").read_text() for name in NAMES}
# Lines with four spaces before them, and the empty lines within.
BLOCKS = {
    name: [
        textwrap.dedent(block).strip("\n")
        for block in re.findall(r"(?:(?:^ {4,}.*)?\n)+", page, re.MULTILINE)
    ]
    for name, page in PAGES.items()
}
COMMANDS = [
    line[2:]
    for blocks in BLOCKS.values()
    for block in blocks
    for line in block.splitlines()
    if line.startswith("$ hvdrun ") and "--mpi slurm" not in line  # that needs a job: tests/rig
]


def block(page, begin):
    (found,) = (text for text in BLOCKS[page] if text.startswith(begin))
    return found


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_of_the_pages_is_one_that_hvdrun_understands(line, capsys):
    _, *words = shlex.split(line)
    assert main(["--dry-run", *words]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.endswith(f" {shlex.join(words[-2:])}")]


def test_a_job_of_the_page_shows_what_the_page_shows(hvdrun):
    line, *expected = block("supervision", "$ hvdrun -np 2 sh").splitlines()
    _, _, *words = shlex.split(line)
    assert sorted(hvdrun(*words).stdout.splitlines()) == sorted(expected)


def test_the_host_file_of_the_page_means_what_the_page_says():
    assert parse_hostfile(block("hosts", "# the old rack"), "hosts.txt") == (
        Host("server1", 4),
        Host("server2", 4, max_slots=8),
        Host("server3", 4),
        Host("server4", 2, "ann"),
        Host("fd00::5", 2, "ann", 2222),
    )


MISTAKES = block("hosts", "hvdrun: -H, entry 2").splitlines()


@pytest.mark.parametrize(
    ("parse", "said"),
    [
        (lambda: parse_hosts("server1:4,server2:x"), MISTAKES[0]),
        (lambda: parse_hostfile("\n\nserver1 cores=4", "hosts.txt"), MISTAKES[1]),
        (lambda: parse_hostfile("server1\n\n\n\nann@server1", "hosts.txt"), MISTAKES[2]),
    ],
    ids=["list", "file", "repeated"],
)
def test_the_mistakes_of_the_page_are_said_so(parse, said):
    with pytest.raises(LaunchError) as caught:
        parse()
    assert f"hvdrun: {caught.value}" == said


def test_the_file_of_options_of_the_page_is_one_and_its_mistake_is_said_so(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    text = block("hosts", "num_proc: 8")
    (tmp_path / "job.yaml").write_text(text)
    assert main(["--config-file", "job.yaml", "--dry-run", "true"]) == 0
    assert "HVDLITE_TIMELINE=timeline.json" in capsys.readouterr().out
    (tmp_path / "job.yaml").write_text(text.replace("fusion_threshold", "fusion_treshold"))
    assert main(["--config-file", "job.yaml", "true"]) == 64
    assert capsys.readouterr().err.strip() == block("hosts", "hvdrun: job.yaml")
