"""What hvdrun asks of srun before it starts anything with it. tests/rig has a real Slurm."""

import pytest

from hvdrun.allocation import Allocation
from hvdrun.asking import Reply
from hvdrun.errors import HostSetupError, NoMpi, SshFailed, UsageError
from hvdrun.findings import no_answer
from hvdrun.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.hosts import Host
from hvdrun.slurm import choose_pmi, with_srun

OPENMPI_5 = Flavour(OPENMPI, "5.0.11", "/venv/bin/mpirun")
MPICH_5 = Flavour(MPICH, "5.0.2", "/venv/bin/mpirun")
SLURM = Allocation("Slurm", (Host("n1", 2),))

LISTED = """\
MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v4
"""
OLDER = "srun: MPI types are...\nsrun: pmix_v3\nsrun: pmix_v2\nsrun: none\nsrun: openmpi\n"


@pytest.mark.parametrize(
    ("kind", "listed", "pmi"),
    [
        (OPENMPI, LISTED, "pmix"),
        (MPICH, LISTED, "pmi2"),
        (INTEL, LISTED, "pmi2"),
        (OPENMPI, OLDER, "pmix_v3"),
    ],
)
def test_srun_speaks_with_the_ranks_as_their_mpi_does(kind, listed, pmi):
    assert choose_pmi(Flavour(kind, "5.0", "/bin/mpirun"), listed) == pmi


@pytest.mark.parametrize(
    ("kind", "listed", "message"),
    [
        (
            MPICH,
            OLDER,
            "MPICH needs `srun --mpi=pmi2`, and this Slurm knows only pmix_v3, pmix_v2,",
        ),
        (
            OPENMPI,
            "MPI plugin types are...\n\tnone\n",
            "`srun --mpi=pmix`, and this Slurm knows on",
        ),
        (OPENMPI, "", "knows only what it does not tell; leave --mpi slurm out"),
    ],
)
def test_a_slurm_without_the_plugin_is_an_error_that_names_what_there_is(kind, listed, message):
    with pytest.raises(NoMpi) as caught:
        choose_pmi(Flavour(kind, "5.0", "/bin/mpirun"), listed)
    assert message in str(caught.value)


@pytest.mark.parametrize("allocation", [None, Allocation("PBS", (Host("n1", 2),))])
def test_outside_of_slurm_there_is_nothing_to_start_with(allocation):
    with pytest.raises(UsageError, match="--mpi slurm works inside an allocation of Slurm's"):
        with_srun(MPICH_5, "/usr/bin/srun", allocation, {})


def test_without_srun_mpirun_is_the_remedy():
    with pytest.raises(NoMpi, match="no srun in PATH; leave it out"):
        with_srun(MPICH_5, "", SLURM, {})


def test_an_srun_that_cannot_be_run_is_an_error():
    with pytest.raises(NoMpi, match=r"`/no/such/srun --mpi=list` failed: .*No such file"):
        with_srun(OPENMPI_5, "/no/such/srun", SLURM, {})


@pytest.mark.parametrize(
    ("stderr", "what", "failure"),
    [
        ("srun: error: Unable to create step for job 7: Invalid node name\n", "srun", SshFailed),
        (
            "python: no\nsrun: error: n1: task 0: Exited with exit code 127\n",
            "Python",
            HostSetupError,
        ),
    ],
)
def test_preflight_tells_what_srun_says_from_what_the_host_says(stderr, what, failure):
    finding = no_answer("n1", "n1", Reply(None, 1, stderr, 0.1), 20.0, "/venv/bin/python")
    assert (finding.what, finding.failure) == (what, failure)
    assert ("srun --overlap -N1 -w n1 true" in finding.remedy) == (what == "srun")
