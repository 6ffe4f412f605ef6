import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.agent.rank.spawn import by_launcher, local_rank_and_size, rank_environment
from hvdrun.machine.environment import (
    forwarded,
    inheritable,
    is_of_the_host,
    pack_host_variables,
    with_host_variables,
    without_step_variables,
)

texts = st.text(st.characters(exclude_characters="\0=", codec="utf-8"), max_size=10)


@pytest.mark.parametrize(
    "name",
    [
        *("HOSTNAME", "PWD", "TMPDIR", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "DISPLAY", "HOME"),
        "DBUS_SESSION_BUS_ADDRESS",
    ],
)
def test_variables_of_a_host_or_a_login_are_not_forwarded(name):
    assert forwarded([name, "MINE"], []) == ("MINE",)


def test_functions_of_a_shell_and_names_that_only_env_can_set_are_forwarded():
    names = ("1X", "BASH_FUNC_module%%", "STAR*", "V_DASH-NAME", "a b", "m\u00fcll")
    assert forwarded(names, []) == names


def test_what_the_user_names_is_forwarded_all_the_same():
    assert forwarded(["PATH"], ["TMPDIR"]) == ("PATH", "TMPDIR")


@pytest.mark.parametrize(
    "name",
    [
        *("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_FD", "HYDI_CONTROL_FD"),
        *(
            "MPI_LOCALRANKID",
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "HVDRUN_LINK",
            "PRTE_LAUNCHED",
        ),
    ],
)
def test_variables_of_one_process_reach_nobody(name):
    assert inheritable({name: "1", "OMPI_MCA_btl": "tcp", "SLURM_JOB_ID": "7"}) == {
        "OMPI_MCA_btl": "tcp",
        "SLURM_JOB_ID": "7",
    }


@pytest.mark.parametrize(
    "name",
    [
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "ROLE_WORLD_SIZE"),
        "HVDLITE_RANK_PROCESS",
    ],
)
def test_variables_of_another_job_around_this_one_reach_nobody(name):
    assert inheritable({name: "1", "HVDLITE_STRICT": "1"}) == {"HVDLITE_STRICT": "1"}


def test_what_is_started_in_a_step_of_slurms_does_not_take_it_for_its_own():
    step = {"SLURM_STEP_ID": "3", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CONF": "/c", "PATH": "/bin"}
    assert without_step_variables({**job, **step}) == job


def test_a_rank_on_another_host_has_that_hosts_own_variables():
    there = pack_host_variables({"HOME": "/home/bob", "TMPDIR": "/scratch", "PATH": "/bin"})
    ours = {"HOME": "/home/ann", "DISPLAY": ":0", "PATH": "/venv/bin", "TMPDIR": "/mine"}
    assert with_host_variables({**ours, "HVDRUN_EXPORTED": "TMPDIR"}, there) == {
        "HOME": "/home/bob",
        "PATH": "/venv/bin",
        "TMPDIR": "/mine",
        "HVDRUN_EXPORTED": "TMPDIR",
    }


def test_no_supervisor_sets_other_variables_than_those_of_the_host():
    said = b"BASH_ENV=/evil\0HOME=/home/bob\0LD_PRELOAD=/evil.so\0PATH=/evil\0=x\0\0SSH_TTY=1"
    given = {"PATH": "/bin", "HOME": "/home/ann"}
    assert with_host_variables(given, said) == {"PATH": "/bin", "HOME": "/home/bob", "SSH_TTY": "1"}


@given(st.dictionaries(st.sampled_from(["HOME", "PWD", "XDG_A", "SSH_B"]), texts, min_size=1))
def test_any_value_gets_there_as_it_is(variables):
    assert all(map(is_of_the_host, variables))
    assert with_host_variables({}, pack_host_variables(variables)) == variables


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2),2",
    "SLURM_NODEID": "2",
}
PMI2 = {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    "given_by_mpi", [OPENMPI, MPICH, SRUN, PMI2], ids=["openmpi", "mpich", "srun", "pmi2"]
)
def test_a_rank_gets_the_variables_that_other_libraries_ask_for(given_by_mpi):
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert rank_environment(given_by_mpi, cores=2) == expected
    assert local_rank_and_size(given_by_mpi) == (1, 2)
    inherited = dict.fromkeys(expected, "9")
    assert rank_environment({**inherited, **given_by_mpi}, cores=2) == expected


@pytest.mark.parametrize(
    ("per_node", "counts"), [("4", [4]), ("2(x3)", [2, 2, 2]), ("2,1(x2),5", [2, 1, 1, 5])]
)
def test_under_srun_a_rank_knows_how_many_there_are_on_its_host(per_node, counts):
    for node, count in enumerate(counts):
        step = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node)}
        assert by_launcher(step)["LOCAL_WORLD_SIZE"] == str(count)


def test_open_mpi_yields_where_ranks_outnumber_the_cores_of_their_host():
    name = "OMPI_MCA_mpi_yield_when_idle"
    assert rank_environment(OPENMPI, cores=1)[name] == "1"
    assert rank_environment({**OPENMPI, name: "0"}, cores=1)[name] == "0"
    assert name not in rank_environment(OPENMPI, cores=2)
