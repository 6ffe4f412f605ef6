"""What a host answers, as its agent does it."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hvdrun
from hvdrun.agent.frames import FACTS, HELLO, unpack
from hvdrun.agent.probe import answer, packed
from hvdrun.plan.facts import from_answer

QUESTION = {
    "folders": sys.path,
    "packages": [],
    "mpirun": "/bin/sh",
    "cwd": "/",
    "program": "sh",
    "script": None,
    "path": "/bin",
    "visible": None,
    "names": ["localhost"],
}


def versions(folders, *packages):
    question = {**QUESTION, "packages": list(packages), "folders": list(map(str, folders))}
    return answer(question)["packages"]


def test_the_probe_imports_neither_torch_nor_mpi_nor_what_takes_long():
    agent = Path(hvdrun.__file__).parent / "agent" / "agent.py"
    question = {**QUESTION, "packages": ["torch", "mpi4py", "no-such"], "mpirun": "/none"}
    command = [sys.executable, "-I", "-S", "-X", "importtime", agent, "host", packed(question)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    ((kind, _, payload), *_) = unpack(bytearray(done.stdout.partition(HELLO)[2]))
    assert kind == FACTS
    said = json.loads(payload)
    assert said["packages"].keys() == {"torch", "mpi4py"}
    assert (said["cwd"], said["program"]) == ("", "")
    assert said["mpirun_missing"] == "there is no such file"
    assert from_answer(said).slots >= 1
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    assert "hvdrun.agent.probe" in loaded
    assert not loaded & {"torch", "mpi4py", "hvdlite", "numpy"}
    assert not loaded & {"importlib.metadata", "glob"}


def test_versions_are_those_of_the_packages_metadata():
    names = ["hvdlite", "mpi4py", "torch", "PyYAML", "typing-extensions", "no-such"]
    expected = {name: importlib.metadata.version(name) for name in names[:-1]}
    assert versions(sys.path, *names) == expected


@pytest.mark.parametrize(
    ("folder", "file"),
    [("impi_rt-9.dist-info", "METADATA"), ("Impi.RT-9-py3.egg-info", "PKG-INFO")],
)
def test_metadata_is_found_under_any_spelling_in_the_first_folder_that_has_it(
    tmp_path, folder, file
):
    for number, text in enumerate(("", "Name: x\nversion:  2.1 \n\nVersion: 3\n", "Version: 4\n")):
        path = tmp_path / str(number) / folder
        path.mkdir(parents=True)
        (path / file).write_text(text)
    folders = [tmp_path / "none", *(tmp_path / str(number) for number in range(3))]
    assert versions(folders, "impi-rt", "impi") == {"impi-rt": "2.1"}


def test_a_package_in_a_folder_of_its_own_is_looked_for_there(tmp_path):
    site, here = tmp_path / "site", tmp_path / "my folder"
    for name, folder, editable in (
        ("mine-1", here, True),
        ("gone.pkg-2", "/no/such", True),
        ("copied-3", "/no/such", False),
    ):
        (site / f"{name}.dist-info").mkdir(parents=True)
        origin = {"url": f"file://{folder}".replace(" ", "%20"), "dir_info": {"editable": editable}}
        (site / f"{name}.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    here.mkdir()
    assert answer({**QUESTION, "folders": [str(site)]})["missing_links"] == {"gone_pkg": "/no/such"}


@pytest.mark.parametrize("is_link", [False, True])
def test_the_same_version_with_other_files_is_noticed(tmp_path, is_link):
    package = tmp_path / "hvdlite"
    (package / "part").mkdir(parents=True)
    origin = {"url": f"file://{tmp_path}", "dir_info": {"editable": True}}
    (tmp_path / "site" / "hvdlite-1.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "hvdlite-1.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    folder = str(tmp_path / "site" if is_link else tmp_path)

    def checksum(file, text):
        (package / file).write_text(text)
        return answer({**QUESTION, "folders": [folder]})["sources"]["hvdlite"]

    first = checksum("__init__.py", "1")
    assert checksum("core.so", "compiled here") == first
    others = [checksum("__init__.py", "2"), checksum("part/a.py", ""), checksum("part/b.py", "")]
    assert len({first, *others}) == 4
    (package / "part" / "b.py").rename(package / "part" / "c.py")
    assert checksum("core.so", "") not in others


def test_an_mpi_of_the_system_is_asked_itself(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho HYDRA; echo Version: 7 >&2; exit 1\n")
    mpirun.chmod(0o755)
    assert answer({**QUESTION, "mpirun": str(mpirun)})["mpirun"] == "HYDRA\nVersion: 7\n"
    mpirun.write_text("#!/no/such/shell\n")
    assert "No such file" in answer({**QUESTION, "mpirun": str(mpirun)})["mpirun"]


def test_an_mpi_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdrun.agent.probe.MPIRUN_S", 0.1)
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "mpirun").chmod(0o755)
    said = answer({**QUESTION, "mpirun": str(tmp_path / "mpirun")})["mpirun"]
    assert said == f"{tmp_path}/mpirun did not end within 0.1 s"
