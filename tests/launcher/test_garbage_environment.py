"""What a platform, a scheduler or a user has put into the environment may be anything: it is read,
or refused with an error that names the variable.

As in test_garbage.py, the values are valid ones with random edits.
"""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdlite.errors import ConfigError
from hvdlite.world.config import Config
from hvdrun.errors import HostListError, UsageError
from hvdrun.knobs import KNOBS
from hvdrun.machine.environment import (
    inheritable,
    pack_host_variables,
    with_host_variables,
    without_step_variables,
)
from hvdrun.plan import schedulers
from hvdrun.rendezvous import place
from tests.launcher.test_garbage import edited

CLUSTER = {"chief": ["a:2222"], "worker": ["b:2222", "[::1]:2222"], "ps": ["c"], "evaluator": ["d"]}


def tf_config(index):
    return json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": index}})


PLACES = [
    {"TF_CONFIG": tf_config(1)},
    {"TF_CONFIG": tf_config("0")},
    {"MASTER_ADDR": "server1", "MASTER_PORT": "29500", "NNODES": "4", "NODE_RANK": "3"},
    {"PET_MASTER_ADDR": "fe80::1", "PET_NNODES": "2:2", "PET_NODE_RANK": "0", "LOCAL_RANK": "0"},
    {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
    {"MASTER_ADDR": "server1", "NNODES": "2", "JOB_COMPLETION_INDEX": "1"},
]
ALLOCATIONS = [
    {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[01-03,7],m5",
        "SLURM_TASKS_PER_NODE": "4(x3),2,1",
        "SLURM_NTASKS": "15",
    },
    {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]b[1-2]", "SLURM_TASKS_PER_NODE": "1(x4)"},
    {"LSB_MCPU_HOSTS": "server1 4 server2 2"},
    {"LSB_DJOB_HOSTFILE": "a\na\nb\n"},
    {"PE_HOSTFILE": "server1 4 all.q UNDEFINED\nserver2 2 all.q <NULL>\n"},
    {"PBS_NODEFILE": "server1\nserver1\nserver2\n"},
]
FILES = ("LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "PBS_NODEFILE")
KNOB_TEXTS = [b"0", b"1", b"true", b"4,2,1", b"60", b"info", b"1e3", b"cpu", b"0x10", b"+1", b" 5 "]


def found_or_refused(read):
    """What is read, and "", or None, and the text of the error."""
    try:
        return read(), ""
    except (ConfigError, HostListError, UsageError) as error:
        return None, str(error)


@st.composite
def garbled(draw, environments):
    """One of the environments with edits in one of its variables."""
    environ = dict(draw(st.sampled_from(environments)))
    name = draw(st.sampled_from(sorted(environ)))
    environ[name] = draw(edited([environ[name].encode()])).decode(errors="surrogateescape")
    return environ


@given(
    st.sampled_from([(knob, n) for knob in KNOBS for n in (knob.variable, knob.horovod) if n]),
    edited(KNOB_TEXTS),
)
def test_a_knob_is_in_its_range_or_refused_by_its_name(which, data):
    knob, variable = which
    text = data.decode(errors="surrogateescape")
    value, error = found_or_refused(lambda: getattr(Config.from_env({variable: text}), knob.name))
    if error:
        assert error.startswith(f"{variable}=")
        assert len(error) < 2000
    elif knob.kind == "int" and value != knob.default:
        assert knob.minimum <= value <= knob.maximum
    elif knob.choices:
        assert value in (*knob.choices, knob.default) or 0 <= int(value) <= knob.maximum


@given(garbled(PLACES))
@example({"TF_CONFIG": "[" * 100_000})
@example({"TF_CONFIG": tf_config(index="9" * 5000)})
@example({"TF_CONFIG": tf_config(index=1e400)})
@example({"MASTER_ADDR": "[[]]", "NNODES": "2", "NODE_RANK": "0"})
def test_a_place_among_hosts_is_found_or_refused(environ):
    found, error = found_or_refused(lambda: place.by_variables(environ))
    if error:
        assert any(name in error for name in environ)
    elif found is not None:
        assert 0 <= found.node_rank < found.nodes
        assert found.host
        assert 0 < found.port < 1 << 16


@given(garbled(ALLOCATIONS))
@example({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n" + "[1]" * 20_000})
@example(
    {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_TASKS_PER_NODE": ",".join(["1(x999999)"] * 1000),
    }
)
def test_an_allocation_is_read_or_refused(environ):
    def read(path):
        if "\0" in path:
            raise FileNotFoundError(path)
        return path

    # The name of a file is its text here.
    found, _ = found_or_refused(lambda: schedulers.find(environ, read))
    for host in found.hosts if found else ():
        assert host.name
        assert host.slots is None or host.slots >= 0


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=40), max_size=6))
def test_the_variables_of_a_host_arrive_as_they_are(given):
    sound = {
        name: value
        for name, value in given.items()
        if "\0" not in name + value and "=" not in name and (name + value).isascii()
    }
    assert inheritable(without_step_variables(sound)).items() <= sound.items()
    assert with_host_variables({}, pack_host_variables(sound)).items() <= sound.items()


def test_the_environments_of_this_file_are_read():
    assert all(place.by_variables(environ) for environ in PLACES)
    for environ in ALLOCATIONS:
        assert schedulers.find(environ, lambda path: path).hosts
    with pytest.raises(ConfigError, match="HVDLITE_BUCKET_BYTES='x'"):
        Config.from_env({"HVDLITE_BUCKET_BYTES": "x"})
