"""The pages of docs/launching: the command lines in them run, as far as one machine goes."""

import re
import subprocess
import textwrap

import pytest
import yaml
from click.testing import CliRunner

from hvdrun.command_line.cli import cli
from hvdrun.plan.hosts import parse_hostfile
from tests.harness.programs import Finished
from tests.harness.worlds import ROOT, python_of

FOLDER = ROOT / "docs" / "launching"
LIMIT_S = 60.0


def blocks(page, language):
    """The text of the fenced blocks of that language, also of those within lists."""
    text = (FOLDER / page).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, body in found]


def commands(page):
    """The lines after a prompt."""
    return re.findall(r"^\$ (.*)$", "\n".join(blocks(page, "console")), re.MULTILINE)


SCRIPT = "from mpi4py import MPI; print('size', MPI.COMM_WORLD.allreduce(1))\n"


def run(line, folder, python):
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        ["sh", "-c", line.replace("hvdrun", f"{python} -m hvdrun", 1)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("line", sorted({*commands("one-machine.md"), *commands("containers.md")}))
def test_the_commands_for_one_machine_run(line, tmp_path):
    done = run(line, tmp_path, python_of("openmpi"))
    assert done.code == 0, done
    number = re.search(r"-np (\d+) .*train\.py", line)
    if number:
        assert len(re.findall(rf"size {number[1]}$", done.stdout, re.MULTILINE)) == int(number[1])
    if "--output-dir" in line:
        assert "size 2" in (tmp_path / "logs/rank.1/stdout").read_text()


@pytest.mark.wide
def test_the_function_in_the_page_is_a_job(tmp_path):
    (program,) = blocks("one-machine.md", "python")
    (tmp_path / "add.py").write_text(program)
    done = subprocess.run(
        [python_of("openmpi"), "add.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    expected = re.findall(r"# (\[.*\])$", program, re.MULTILINE)
    assert done.stdout.splitlines() == expected, done.stderr


def test_the_operators_hostfile_is_one(tmp_path):
    (listed,) = blocks("kubernetes.md", "text")
    hosts = parse_hostfile(listed, "/etc/mpi/hostfile")
    assert [(host.name, host.slots) for host in hosts] == [
        ("train-worker-0.train.default.svc", 4),
        ("train-worker-1.train.default.svc", 4),
    ]


def test_the_operators_job_runs_hvdrun_with_that_hostfile():
    (manifest,) = [text for text in blocks("kubernetes.md", "yaml") if "MPIJob" in text]
    job = yaml.safe_load(manifest)["spec"]
    (launcher,) = job["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    (line,) = commands("kubernetes.md")
    assert launcher["command"] == line.split()
    (worker,) = job["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == job["slotsPerWorker"]


def test_the_help_lists_every_option_that_has_a_text():
    shown = CliRunner().invoke(cli, ["--help"], prog_name="hvdrun").output
    for option in cli.params:
        if getattr(option, "help", None) and not getattr(option, "hidden", False):
            assert option.opts[0] in shown, option.opts


def test_every_example_of_the_help_is_one_that_hvdrun_understands():
    from hvdrun.command_line.hvdrun_option import EXAMPLES

    for line in EXAMPLES.splitlines():
        words = re.split(r"\s{2,}", line)[0].split()[1:]
        context = cli.make_context("hvdrun", words)
        assert context.params["command"] or context.params["check"] or "--check-build" in words
