"""`hvdrun --check-build`: what this installation can do."""

import os
import re
import subprocess

import pytest

from hvdlite import _core
from hvdlite.check_build import cpu_info
from hvdrun.command_line import cli
from hvdrun.plan import flavour


def line_of(text, name):
    match = re.search(rf"^    \[(.)\] {re.escape(name)} +(.*)$", text, re.MULTILINE)
    assert match, text
    return match.groups()


@pytest.mark.wide_in("mpich")
def test_it_says_which_mpi_works_and_what_the_host_has(hvdrun, python):
    done = hvdrun("-cb")
    assert done.code == 0, done
    mpirun = [python.with_name("mpirun"), "--version"]
    said = subprocess.run(mpirun, capture_output=True, text=True, check=True).stdout
    version = re.search(r"(?:Open MPI\)|Version:)\s*(\S+)", said)
    assert version
    there, what = line_of(done.stdout, "MPI")
    assert there == "X"
    assert version[1] in what
    assert line_of(done.stdout, "several threads")[0] == "X"
    assert line_of(done.stdout, "shared memory")[0] == "X"
    assert line_of(done.stdout, "kernels")[1].split()[0] == _core.kernel_variants()[0]
    assert line_of(done.stdout, "cores")[1].endswith(
        f", {len(os.sched_getaffinity(0))} hardware threads"
    )


def test_without_an_mpi_the_rest_is_shown_all_the_same(monkeypatch, capfd):
    monkeypatch.setattr(flavour, "candidates", lambda prefix, path: [])
    assert cli.main(["--check-build"]) == 0
    shown = capfd.readouterr()
    assert "hvdrun: no MPI was found" in shown.err
    assert line_of(shown.out, "MPI")[0] == " "
    assert line_of(shown.out, "PyTorch")[0] == "X"


ARM = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd asimdhp bf16
"""
X86 = """\
processor\t: 0
model name\t: A CPU @ 2.00GHz
flags\t\t: fpu avx avx2
processor\t: 1
model name\t: Another
"""


def test_the_cpu_is_described_by_what_linux_says_of_it():
    assert cpu_info(X86) == ("A CPU @ 2.00GHz", {"fpu", "avx", "avx2"})
    assert cpu_info(ARM) == ("", {"fp", "asimd", "asimdhp", "bf16"})
