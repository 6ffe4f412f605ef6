"""The hosts of an allocation, read from the variables and files of batch schedulers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.errors import HostListError, UsageError
from hvdrun.plan.hosts import Host
from hvdrun.plan.request import Allocation
from hvdrun.plan.schedulers import SCHEDULERS, find, remedy
from hvdrun.plan.schedulers.slurm import expand_counts, expand_nodes

JOB = {"SLURM_JOB_ID": "7"}


def found(environ, files=None):
    def read(path):
        try:
            return (files or {})[path]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory") from None

    return find(environ, read)


def slurm(nodes, per_node, **more):
    environ = {**JOB, "SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": per_node, **more}
    return found(environ).hosts


def test_without_a_scheduler_there_is_no_allocation():
    assert found({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "LSB_JOBID": "1"}) is None
    assert found({"SLURM_JOB_NODELIST": "n1"}) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[01-03,7],m5", "n01 n02 n03 n7 m5"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]n[1,3]", "r1n1 r1n3 r2n1 r2n3"),
        ("gpu-[1-2].site,login", "gpu-1.site gpu-2.site login"),
        ("a,b,c[4]", "a b c4"),
    ],
)
def test_a_compressed_list_of_nodes_is_written_out(text, names):
    assert expand_nodes(text, "NODES") == names.split()


# An oracle of its own: a list is written down together with what it means.
numbers = st.integers(0, 3).flatmap(
    lambda width: st.tuples(st.integers(0, 120), st.integers(0, 12)).map(
        lambda pair: (
            f"{pair[0]:0{width}}" + (f"-{pair[0] + pair[1]:0{width}}" if pair[1] else ""),
            [str(n).rjust(width, "0") for n in range(pair[0], pair[0] + pair[1] + 1)],
        )
    )
)
texts = st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True).map(lambda word: (word, [word]))
ranges = st.lists(numbers, min_size=1, max_size=3).map(
    lambda parts: (
        "[" + ",".join(text for text, _ in parts) + "]",
        [name for _, names in parts for name in names],
    )
)
entries = st.tuples(texts, st.lists(ranges | texts, max_size=2)).map(
    lambda parts: (
        parts[0][0] + "".join(text for text, _ in parts[1]),
        ["".join(p) for p in itertools.product(parts[0][1], *(names for _, names in parts[1]))],
    )
)


@given(st.lists(entries, min_size=1, max_size=4))
def test_any_list_of_nodes_means_what_its_parts_mean(parts):
    text = ",".join(text for text, _ in parts)
    assert expand_nodes(text, "NODES") == [name for _, names in parts for name in names]


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_are_repeated_as_often_as_they_say(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)
    assert expand_counts(text, "N") == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("expand", [expand_nodes, expand_counts])
@given(text=st.text(max_size=30))
def test_any_text_is_a_list_or_a_clear_error(expand, text):
    try:
        assert expand(text, "VARIABLE")
    except HostListError as error:
        message = str(error)
    else:
        return
    assert message.startswith("VARIABLE")


def test_slurms_tasks_are_the_slots_of_its_nodes_in_its_order():
    hosts = slurm("n[2-3],m1", "4(x2),3", SLURM_NTASKS="11")
    assert [(h.name, h.slots) for h in hosts] == [("n2", 4), ("n3", 4), ("m1", 3)]


def test_where_slurm_was_asked_for_no_tasks_its_processors_are_no_limit():
    assert slurm("n[1-2]", "8(x2)") == (Host("n1", cpus=8), Host("n2", cpus=8))
    (host,) = slurm("n1", "8", SLURM_NTASKS_PER_NODE="8")
    assert host.slots == 8


def test_in_a_step_of_its_own_hvdrun_has_the_processors_of_the_job():
    step = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"}
    assert slurm("n[1-2]", "1", SLURM_JOB_CPUS_PER_NODE="4,2", **step) == (
        Host("n1", cpus=4),
        Host("n2", cpus=2),
    )
    # salloc's own shell is such a step where Slurm is set up so; its variables are the job's.
    step["SLURM_NTASKS"] = "6"
    hosts = slurm("n[1-2]", "4,2", SLURM_JOB_CPUS_PER_NODE="8,8", **step)
    assert [host.slots for host in hosts] == [4, 2]


def test_slurms_older_names_of_the_variables_count_too():
    old = {"SLURM_JOBID": "7", "SLURM_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2"}
    assert found({**old, "SLURM_NTASKS": "2"}) == Allocation("Slurm", (Host("n1", 2, cpus=2),))


@pytest.mark.parametrize(
    ("nodes", "per_node", "message"),
    [
        ("n[1-", "1", "SLURM_JOB_NODELIST=n[1-: expected names such as"),
        ("n[3-1]", "1", "'[3-1]' is not a range of nodes"),
        ("n[a-b]", "1", "'[a-b]' is not a range of nodes"),
        ("n[1-99999][1-99999]", "1", "'n[1-99999][1-99999]' is more than 131072 nodes"),
        ("n1,$(id)", "1(x2)", "SLURM_JOB_NODELIST: '$(id)' is not a host name"),
        ("n[1-3]", "4(x2)", "names 3 nodes, but SLURM_TASKS_PER_NODE=4(x2) has 2 numbers"),
        ("n1", "4x", "SLURM_TASKS_PER_NODE=4x: '4x' is not a count; expected e.g. 4(x2),3"),
    ],
)
def test_what_slurm_says_is_understood_or_an_error_with_the_variable(nodes, per_node, message):
    with pytest.raises(HostListError) as caught:
        slurm(nodes, per_node)
    assert message in str(caught.value)


def test_srun_starts_hvdrun_once_or_the_others_say_so():
    assert slurm("n1", "4", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="4")
    with pytest.raises(UsageError, match="srun has started hvdrun 4 times; start it once"):
        slurm("n1", "4", SLURM_PROCID="3", SLURM_STEP_NUM_TASKS="4")


@pytest.mark.parametrize(
    ("variable", "scheduler"), [("PBS_NODEFILE", "PBS"), ("LSB_DJOB_HOSTFILE", "LSF")]
)
def test_pbs_and_lsf_name_a_host_once_for_each_of_its_slots(variable, scheduler):
    files = {"/jobs/nodes": "n1\nn1\nn2.site\nn1\n"}
    allocation = found({variable: "/jobs/nodes"}, files)
    assert allocation == Allocation(scheduler, (Host("n1", 3), Host("n2.site", 1)))


def test_lsf_without_its_file_tells_pairs():
    allocation = found({"LSB_MCPU_HOSTS": "n1 4 n2 2 "})
    assert allocation == Allocation("LSF", (Host("n1", 4), Host("n2", 2)))


def test_sge_tells_slots_queue_and_processors():
    files = {"/pe": "n1.site 4 all.q@n1.site UNDEFINED\nn2.site 2 all.q@n2.site <NULL>\n"}
    allocation = found({"PE_HOSTFILE": "/pe", "JOB_ID": "9"}, files)
    assert allocation == Allocation("SGE", (Host("n1.site", 4), Host("n2.site", 2)))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PBS_NODEFILE": "/none"}, "PBS_NODEFILE=/none, the list of hosts from PBS: No such file"),
        ({"PBS_NODEFILE": "/empty"}, "/empty names no host"),
        ({"PBS_NODEFILE": "/odd"}, "/odd:2: '-oX' is not a host name"),
        ({"PE_HOSTFILE": "/short"}, "/short:1: 'n1': expected a host and its slots"),
        ({"PE_HOSTFILE": "/zero"}, "/zero:1: the slots must be a whole number above 0, not '0'"),
        ({"LSB_MCPU_HOSTS": "n1 4 n2"}, "LSB_MCPU_HOSTS=n1 4 n2: expected pairs of a host and"),
        ({"LSB_MCPU_HOSTS": "n1 x"}, "LSB_MCPU_HOSTS: the slots must be a whole number"),
    ],
)
def test_what_cannot_be_understood_is_an_error_with_its_place(environ, message):
    files = {"/empty": "\n", "/odd": "n1\n-oX\n", "/short": "n1\n", "/zero": "n1 0 q\n"}
    with pytest.raises(HostListError) as caught:
        found(environ, files)
    assert message in str(caught.value)


def test_each_scheduler_is_a_row_of_its_own():
    for kind in ("name", "option"):
        names = [name for row in SCHEDULERS if (name := getattr(row, kind))]
        assert len(set(names)) == len(names)
    assert remedy(Allocation("PBS", ())) == "ask PBS for more (mpiprocs, or ppn)"
    for row in SCHEDULERS:
        assert bool(row.option) == bool(row.start_with)
