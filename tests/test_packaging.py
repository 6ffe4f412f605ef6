"""hvdlite installs wherever there is a Python and a C compiler, and says what is missing."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCE = (".git", ".venv*", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache")

_setup = configparser.ConfigParser()
_setup.read(ROOT / "setup.cfg")
VERSION = _setup["metadata"]["version"]


def run(*command, cwd=None, path=None):
    """The output of a command that has to succeed."""
    environment = {**os.environ, **({"PATH": str(path)} if path else {})}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def link_commands(folder, *names):
    """Makes a PATH with nothing but these commands."""
    folder.mkdir()
    for name in names:
        target = shutil.which(name)
        assert target, name
        (folder / name).symlink_to(target)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the source tree, in which nothing has been built."""
    target = tmp_path_factory.mktemp("source") / "hvdlite"
    return shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*NOT_SOURCE))


@pytest.fixture(scope="module")
def only_a_compiler(tmp_path_factory):
    """A PATH without mpicc, but with the C compiler that setuptools calls."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC")).split()[0]
    return link_commands(tmp_path_factory.mktemp("path") / "bin", compiler, "as", "ld")


@pytest.fixture(scope="module")
def sdist(source):
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", source)
    return source / "dist" / f"hvdlite-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory, only_a_compiler):
    """Built from the sdist, not from the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, sdist, path=only_a_compiler)
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def environment(tmp_path):
    """A virtual environment that finds the dependencies and setuptools of this one, not hvdlite.

    A path in a .pth file is searched, but the .pth files in it, such as that of this environment's
    own editable hvdlite, are not read.
    """
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def pip_install(python, *what, path):
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed")
    run(sys.executable, "-m", "pip", "--python", python, "install", *flags, *what, path=path)


def check_installed(python, where):
    """The package, the core and the launcher come from `where`, and work."""
    code = (
        "import hvdlite, hvdlite._core, hvdrun.command_line.cli as c;"
        "print(hvdlite._core.__file__, c.__file__)"
    )
    files = run(python, "-W", "error", "-c", code, cwd="/").split()
    assert all(Path(file).is_relative_to(where) for file in files), files
    assert run(python, "-c", "import hvdlite; print(hvdlite.__version__)", cwd="/").strip() == (
        VERSION
    )
    assert VERSION in run(python.parent / "hvdrun", "--version", cwd="/")


def test_every_folder_with_modules_is_a_package_of_the_setup():
    folders = {"hvdlite": ROOT / "hvdlite", "hvdrun": ROOT / "launcher"}
    found = {
        ".".join((name, *file.parent.relative_to(folder).parts))
        for name, folder in folders.items()
        for file in folder.rglob("*.py")
    }
    assert set(_setup["options"]["packages"].split()) == found


def test_the_sdist_has_everything_that_the_build_reads(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    core = {str(path.relative_to(ROOT)) for path in (ROOT / "hvdlite/_core").rglob("*.[ch]")}
    assert core
    assert core <= names
    assert names >= {"setup.py", "setup.cfg", "pyproject.toml", "LICENSE", "hvdlite/_core.pyi"}


@pytest.mark.wide
def test_one_wheel_serves_every_python_from_3_10_on(wheel):
    assert re.fullmatch(rf"hvdlite-{VERSION}-cp310-abi3-linux_\w+\.whl", wheel.name)


@pytest.mark.wide
def test_the_wheel_has_the_core_its_types_and_the_launcher_and_no_sources(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= {
        *("hvdlite/__init__.py", "hvdlite/_core.abi3.so", "hvdlite/_core.pyi", "hvdlite/py.typed"),
        *("hvdrun/command_line/cli.py", "hvdrun/agent/agent.py", "hvdrun/py.typed"),
    }
    assert not [name for name in names if name.endswith((".c", ".h")) or "launcher/" in name]


# The tree itself is what `make build` installs.
@pytest.mark.wide
def test_the_wheel_works_when_installed(wheel, environment, only_a_compiler):
    pip_install(environment, wheel, path=only_a_compiler)
    check_installed(environment, environment.parent.parent)


def test_the_version_stands_in_one_place():
    places = ("*.toml", "*.cfg", "setup.py", "Makefile", "hvdlite/**/*.[pch]*", "launcher/**/*.py")
    files = {path for place in places for path in ROOT.glob(place) if path.suffix != ".pyc"}
    version = re.compile(rf"\b{re.escape(VERSION)}\b")
    holders = [path.name for path in files if version.search(path.read_text())]
    assert holders == ["setup.cfg"]


class Machine:
    """A PATH with little on it, in which single commands can be replaced."""

    def __init__(self, folder):
        tools = ("sh", "uname", "mktemp", "rm", "grep", "make", "as", "ld")
        self.path = link_commands(folder, *tools)
        self.compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        (self.path / self.compiler).symlink_to(shutil.which(self.compiler))
        self.python("")

    def command(self, name, script):
        """Puts a shell script in the place of a command."""
        (self.path / name).unlink(missing_ok=True)
        (self.path / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
        (self.path / name).chmod(0o755)

    def python(self, first):
        """python3 that runs these statements before those that it is given with -c."""
        self.command("python3", f"exec {sys.executable} -c '{first}\n'\"$2\"")

    def check(self, command=(str(ROOT / "tools/check-machine"),), cwd=None):
        environment = {k: v for k, v in os.environ.items() if k != "CC" and "MAKE" not in k}
        environment["PATH"] = str(self.path)
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "bin")


def test_a_machine_that_has_everything_passes_in_silence(machine):
    assert machine.check() == (0, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda m: m.command("uname", "echo Darwin"),
            "it runs on Linux, and this is Darwin;",
            id="another operating system",
        ),
        pytest.param(
            lambda m: (m.path / "python3").unlink(),
            "no python3; apt-get install python3 ",
            id="no Python",
        ),
        pytest.param(
            lambda m: m.python("import sys; sys.version_info = (3, 9, 18)"),
            "python3 is Python 3.9, and 3.10 is the oldest that works;",
            id="an old Python",
        ),
        pytest.param(
            lambda m: m.python('import sys; sys.modules["ensurepip"] = None'),
            "python3 has no venv; apt-get install python3-venv",
            id="no venv",
        ),
        pytest.param(
            lambda m: m.python('import sysconfig; sysconfig.get_path = lambda _: "/nowhere"'),
            "no Python.h in /nowhere; apt-get install python3-dev",
            id="no headers of Python",
        ),
        pytest.param(
            lambda m: (m.path / m.compiler).unlink(),
            "no C compiler (",
            id="no C compiler",
        ),
        pytest.param(
            lambda m: m.command(
                m.compiler, "echo 'fatal error: stdio.h: No such file' >&2; exit 1"
            ),
            "can't build a C program (fatal error: stdio.h: No such file); "
            "apt-get install gcc libc6-dev",
            id="no headers of C",
        ),
    ],
)
def test_what_the_machine_lacks_is_named_in_one_line(machine, change, message):
    change(machine)
    code, output = machine.check()
    assert code == 1
    assert message in output
    assert output.startswith("hvdlite can't be built here: ")
    assert output.count("\n") == 1


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_says_it_before_it_makes_anything(machine, source, target):
    (machine.path / "python3").unlink()
    code, output = machine.check(("make", target), cwd=source)
    assert code != 0
    assert output.startswith("hvdlite can't be built here: no python3;")
    assert not (source / ".venv").exists()
