"""What hvdrun asks of srun before it starts anything with it. tests/rig has a real Slurm."""

import pytest

from hvdrun.errors import HostSetupError, NoMpi, SshFailed, UsageError
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.plan.hosts import Host, Share, parse_hosts
from hvdrun.plan.request import Allocation
from hvdrun.plan.schedulers.slurm import Srun, choose_pmi, requeue_of_job, with_srun
from hvdrun.preflight.reply import Reply, no_answer

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
    assert choose_pmi(kind, listed) == pmi


@pytest.mark.parametrize(
    ("kind", "listed", "message"),
    [
        (
            MPICH,
            OLDER,
            "MPICH needs `srun --mpi=pmi2`, but `srun --mpi=list` shows pmix_v3, pmix_v2,",
        ),
        (
            OPENMPI,
            "MPI plugin types are...\n\tnone\n",
            "`srun --mpi=pmix`, but `srun --mpi=list` shows none;",
        ),
        (OPENMPI, "", "`srun --mpi=list` shows nothing; leave --mpi slurm out"),
    ],
)
def test_a_slurm_without_the_plugin_is_an_error_that_names_what_there_is(kind, listed, message):
    with pytest.raises(NoMpi) as caught:
        choose_pmi(kind, listed)
    assert message in str(caught.value)


@pytest.mark.parametrize("allocation", [None, Allocation("PBS", (Host("n1", 2),))])
def test_outside_of_slurm_there_is_nothing_to_start_with(allocation):
    with pytest.raises(UsageError, match="--mpi slurm works only inside a Slurm allocation"):
        with_srun(MPICH_5, Srun("/usr/bin/srun"), allocation, {})


def test_without_srun_mpirun_is_the_remedy():
    with pytest.raises(NoMpi, match="srun is not in PATH; leave --mpi slurm out"):
        with_srun(MPICH_5, None, SLURM, {})


def test_an_srun_that_cannot_be_run_is_an_error():
    with pytest.raises(NoMpi, match=r"`/no/such/srun --mpi=list` failed: .*No such file"):
        with_srun(OPENMPI_5, Srun("/no/such/srun"), SLURM, {})


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
    reply = Reply(None, 127, stderr, 0.1)
    finding = no_answer("n1", "n1", reply, 20.0, "/venv/bin/python", "/venv/agent.py")
    assert (finding.what, finding.failure) == (what, failure)
    assert ("srun --overlap -N1 -w n1 true" in finding.remedy) == (what == "srun")


def layout(flavour, hosts, allocated="a:3,b:1,c:1"):
    """The options that say which host has how many ranks."""
    shares = [Share(host, host.slots) for host in parse_hosts(hosts)]
    allocation = Allocation("Slurm", parse_hosts(allocated))
    options = flavour.starter.rank_options(flavour.kind, allocation, shares, {}, "/")
    named = [word for word in options if word.startswith(("--distribution", "--nodelist"))]
    assert f"--ntasks={sum(share.count for share in shares)}" in options
    assert f"--nodes={len(shares)}" in options
    return " ".join(named)


BY_PMIX = Flavour(OPENMPI, "5.0.11", "/bin/mpirun", Srun("/bin/srun", "pmix_v4"))
BY_PMI2 = Flavour(MPICH, "5.0.2", "/bin/mpirun", Srun("/bin/srun", "pmi2"))


@pytest.mark.parametrize("flavour", [BY_PMIX, BY_PMI2], ids=str)
@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        ("a:2,b:2,c:2", "--distribution=plane=2 --nodelist=a,b,c"),
        ("a:2,c:1", "--distribution=plane=2 --nodelist=a,c"),
        ("b:7", "--distribution=plane=7 --nodelist=b"),
        ("a:3,b:1,c:1", "--distribution=block"),  # as Slurm would have it
    ],
)
def test_srun_puts_ranks_where_hvdrun_does_whatever_the_mpi(flavour, hosts, options):
    assert layout(flavour, hosts) == options


def test_what_only_a_list_of_nodes_can_say_is_said_to_open_mpi_alone():
    options = "--distribution=arbitrary --nodelist=a,b,b,c,c"
    assert layout(BY_PMIX, "a:1,b:2,c:2") == options
    with pytest.raises(UsageError) as caught:
        layout(BY_PMI2, "a:1,b:2,c:2")
    assert "the ranks of MPICH which host they are on with a:1, b:2, c:2;" in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("a:1,d:1", "d is not in this allocation, which has a, b, c"),
        ("c:2,a:1", "srun always uses Slurm's order of the hosts; write -H a:1,c:2"),
    ],
)
def test_srun_starts_ranks_on_hosts_of_the_allocation_in_slurms_order(hosts, message):
    with pytest.raises(UsageError, match=message):
        layout(BY_PMIX, hosts)


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"SLURM_JOB_ID": "7"}, "7"),
        # One task of an array has the array's own number.
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "7_0"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "9"),
    ],
)
def test_of_a_job_array_only_the_task_in_which_hvdrun_runs_is_asked_to_run_again(
    variables, job, tmp_path
):
    scontrol = tmp_path / "scontrol"
    scontrol.touch(0o755)
    asking = requeue_of_job({"PATH": str(tmp_path), **variables})
    assert asking.ask == (str(scontrol), "requeue", job)
    assert asking.look == (str(scontrol), "show", "job", job)
