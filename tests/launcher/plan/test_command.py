"""The whole command line per MPI."""

import re
import shlex
from dataclasses import replace

import pytest

from hvdrun.agent.ssh import destination
from hvdrun.errors import HostSetupError, TooManyProcesses, UsageError
from hvdrun.machine.environment import for_launchers
from hvdrun.machine.remote_words import escape, unescape
from hvdrun.plan.command import build
from hvdrun.plan.facts import HostFacts, Interface, LocalFacts, SharedMemory, in_users_words
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.plan.hosts import Host, Share, parse_hosts
from hvdrun.plan.request import Allocation, Request
from hvdrun.plan.schedulers.slurm import Srun
from tests.launcher.preflight.answers import facts_of

OPENMPI_5 = Flavour(OPENMPI, "5.0.11", "/venv/bin/mpirun")
OPENMPI_4 = Flavour(OPENMPI, "4.1.4", "/venv/bin/mpirun")
MPICH_5 = Flavour(MPICH, "5.0.2", "/venv/bin/mpirun")
INTEL_2021 = Flavour(INTEL, "2021.13", "/venv/bin/mpirun")
ALL = (OPENMPI_5, OPENMPI_4, MPICH_5, INTEL_2021)

FACTS = LocalFacts(
    environ={"PATH": "/venv/bin:/bin", "HOME": "/home/ann", "LANG": "C", "TOKEN": "s3cret"},
    cwd="/home/ann/my job",
    python="/venv/bin/python",
    agent="/venv/hvdrun/agent/agent.py",
    hostname="server1",
    local_names=frozenset({"localhost", "127.0.0.1", "::1", "server1"}),
    cores=4,
    gpus=0,
    is_root=False,
    has_fabric=False,
    master_port=45678,
)

AGENT = "/venv/bin/python -I -S /venv/hvdrun/agent/agent.py"
FOUR_HOSTS = "server1:4,server2:4,server3:4,server4:4"
NUMBERED = "localhost:4,hvdrun-host-1:4,hvdrun-host-2:4,hvdrun-host-3:4"


def command(flavour, hosts=None, facts=FACTS, **options):
    options.setdefault("command", ("python", "train.py"))
    parsed = parse_hosts(hosts) if hosts else ()
    return build(Request(hosts=parsed, **options), flavour, facts)


def argv(*words):
    """The words of several pieces of a command line."""
    return tuple(word for piece in words for word in shlex.split(piece))


NAMES = "LANG MASTER_ADDR MASTER_PORT PATH PYTHONUNBUFFERED TOKEN"

EXPECTED = {
    OPENMPI_5: argv(
        f"/venv/bin/mpirun -np 16 -H {NUMBERED} --map-by slot --bind-to none",
        "--mca btl ^ofi --mca mtl ^ofi --wdir '/home/ann/my job' --prtemca plm ssh",
        f"--prtemca plm_ssh_agent '{AGENT} ssh' --prtemca plm_ssh_no_tree_spawn 1",
        "--prtemca prte_keep_fqdn_hostnames 1 --pmixmca pmix_keep_fqdn_hostnames 1",
        "--prtemca prte_do_not_resolve 1",
        f"-x HVDRUN_LINK {AGENT} rank python train.py",
    ),
    OPENMPI_4: argv(
        f"/venv/bin/mpirun -np 16 -H {NUMBERED} --map-by slot --bind-to none",
        "--mca btl ^ofi --mca mtl ^ofi --wdir '/home/ann/my job' --mca plm rsh",
        f"--mca plm_rsh_agent '{AGENT} ssh' --mca plm_rsh_no_tree_spawn 1",
        "--mca orte_keep_fqdn_hostnames 1 --mca if_base_do_not_resolve 1",
        f"-x HVDRUN_LINK {AGENT} rank python train.py",
    ),
    MPICH_5: argv(
        "/venv/bin/mpirun -np 16 -rmk user",
        "-hosts localhost:4,0.1.0.1:4,0.1.0.2:4,0.1.0.3:4 -bind-to none",
        "-launcher rsh -launcher-exec /venv/bin/python -wdir '/home/ann/my job'",
        f"-localhost server1 -genvall {AGENT} rank python train.py",
    ),
    INTEL_2021: argv(
        "/venv/bin/mpirun -bootstrap rsh -bootstrap-exec /venv/bin/python",
        "-gwdir '/home/ann/my job' -genvall",
        f"-host server1 -n 4 {AGENT} rank python train.py :",
        f"-host server2 -n 4 {AGENT} rank python train.py :",
        f"-host server3 -n 4 {AGENT} rank python train.py :",
        f"-host server4 -n 4 {AGENT} rank python train.py",
    ),
}


@pytest.mark.parametrize("flavour", ALL, ids=str)
def test_the_whole_command_line_for_sixteen_ranks_on_four_hosts(flavour):
    assert command(flavour, FOUR_HOSTS, num_proc=16).argv == EXPECTED[flavour]


TRANSPORTS = "--mca btl ^ofi,tcp --mca mtl ^ofi"
LOCAL = {
    OPENMPI_5: f"-np 2 -H localhost:2 --map-by slot --bind-to none {TRANSPORTS}",
    OPENMPI_4: f"-np 2 -H localhost:2 --map-by slot --bind-to none {TRANSPORTS}",
    MPICH_5: "-np 2 -rmk user -hosts localhost:2 -bind-to none -launcher fork -genvall",
    INTEL_2021: "-bootstrap fork -genvall -host localhost -n 2",
}


@pytest.mark.parametrize("hosts", [None, "localhost:2", "server1:1,127.0.0.1:1", "SERVER1:2"])
@pytest.mark.parametrize("flavour", ALL, ids=str)
def test_on_this_machine_nothing_goes_over_ssh_whatever_it_is_called(flavour, hosts):
    expected = argv("/venv/bin/mpirun", LOCAL[flavour], AGENT, "rank python train.py")
    assert command(flavour, hosts, num_proc=2).argv == expected


@pytest.mark.parametrize("flavour", ALL, ids=str)
@pytest.mark.parametrize("hosts", [None, "server1:2,server2:2"])
def test_values_of_variables_never_stand_in_the_command_line(flavour, hosts):
    made = command(flavour, hosts, exports={"KEY": "hidden", "TOKEN": None})
    assert not [word for word in made.argv if "hidden" in word or "s3cret" in word]
    assert made.environment["KEY"] == "hidden"
    assert made.environment["TOKEN"] == "s3cret"
    shown = made.show(FACTS)
    assert "hidden" not in shown
    assert "s3cret" not in shown
    assert {"KEY", "TOKEN"} <= set(made.passed)
    # mpirun sends what it has in plain text.
    assert (made.sent is None) is (hosts is None)
    if made.sent:
        assert (made.sent["KEY"], made.sent["TOKEN"]) == ("hidden", "s3cret")
        of_mpi = for_launchers(made.environment)
        assert not {"hidden", "s3cret"} & set(of_mpi.values())
        assert {"PATH", "HOME", "HVDRUN_SSH"} <= set(of_mpi)
        assert "HOME" not in made.sent


def test_empty_variables_of_nccl_do_not_reach_the_ranks_and_are_named():
    environ = {**FACTS.environ, "NCCL_IB_GID_INDEX": "", "NCCL_DEBUG": "INFO", "EMPTY": ""}
    facts = replace(FACTS, environ=environ, network_variables={"NCCL_SOCKET_IFNAME": "=eth0"})
    exports = {"NCCL_NET": "", "NCCL_SOCKET_IFNAME": ""}
    made = command(OPENMPI_5, "server1:2,server2:2", facts, exports=exports)
    (note,) = made.notes
    assert ": NCCL_IB_GID_INDEX, NCCL_NET, NCCL_SOCKET_IFNAME; " in note
    assert made.environment.keys() & {*environ, *exports} == {
        *(*FACTS.environ, "NCCL_DEBUG", "EMPTY"),
        "NCCL_SOCKET_IFNAME",  # as hvdrun sets it where the user does not
    }
    assert made.environment["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert not {"NCCL_NET", "NCCL_IB_GID_INDEX"} & {*made.passed, *made.argv}
    assert made.environment["HVDRUN_EXPORTED"] == ""
    assert command(OPENMPI_5).notes == ()


def test_a_verbose_rank_says_where_its_gpu_is_unless_hvdrun_does_not_bind_it():
    assert "verbose-rank" in command(OPENMPI_5, verbose=True).argv
    bound_by_mpi = command(OPENMPI_5, verbose=True, binding_args=("--bind-to", "core"))
    assert "unbound-rank" in bound_by_mpi.argv


def test_a_dry_run_shows_where_what_and_with_which_variables():
    shown = command(OPENMPI_5, num_proc=2).show(FACTS)
    assert shown == (
        "cd '/home/ann/my job'\n"
        f"# variables that the ranks get: {NAMES} UCX_NET_DEVICES\n"
        "PYTHONUNBUFFERED=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=45678 UCX_NET_DEVICES=lo"
        " /venv/bin/mpirun -np 2 -H localhost:2 --map-by slot --bind-to none"
        " --mca btl '^ofi,tcp' --mca mtl '^ofi'"
        f" {AGENT} rank python train.py"
    )


@pytest.mark.parametrize("flavour", [OPENMPI_5, OPENMPI_4], ids=str)
def test_open_mpi_may_be_run_by_root(flavour):
    made = command(flavour, num_proc=2, facts=replace(FACTS, is_root=True))
    assert made.argv[1] == "--allow-run-as-root"


def test_where_there_is_a_fabric_libfabric_is_left_in():
    made = command(OPENMPI_5, facts=replace(FACTS, has_fabric=True))
    assert "^ofi" not in made.argv
    assert made.explanations == ()


def test_with_verbose_one_line_says_that_libfabric_is_left_out():
    (line,) = command(OPENMPI_5).explanations
    assert "Open MPI runs without libfabric (^ofi), as this host has no InfiniBand" in line
    assert command(MPICH_5).explanations == ()


def test_what_the_user_says_about_open_mpis_transports_stands():
    environ = {**FACTS.environ, "OMPI_MCA_btl": "self,tcp"}
    made = command(OPENMPI_5, facts=replace(FACTS, environ=environ))
    assert argv("--mca mtl ^ofi") == made.argv[-10:-7]
    assert made.argv.count("^ofi") == 1
    assert command(OPENMPI_5, mpi_args=("--mca", "btl", "tcp")).argv.count("^ofi") == 1


@pytest.mark.parametrize(
    ("flavour", "words"),
    [
        (OPENMPI_5, "-x FOO=a=2 --x TOKEN --tag-output"),
        (MPICH_5, "-genv FOO a=2 -genvlist TOKEN --tag-output"),
        (INTEL_2021, "-genv FOO=a=2 -env TOKEN s3cret --tag-output"),
    ],
    ids=str,
)
@pytest.mark.parametrize("hosts", [None, "server1:2,server2:2"])
def test_variables_in_mpi_args_win_as_hvdruns_own_do(flavour, words, hosts):
    facts = replace(FACTS, environ={**FACTS.environ, "FOO": "1"})
    given = {"mpi_args": tuple(words.split()), "exports": {"FOO": "3"}}
    made = command(flavour, hosts, facts, **given)
    assert (made.environment["FOO"], made.environment["TOKEN"]) == ("a=2", "s3cret")
    assert made.sent is None or made.sent["FOO"] == "a=2"
    without = command(flavour, hosts, facts, mpi_args=("--tag-output",))
    assert made.argv == without.argv
    assert made.environment.get("HVDRUN_EXPORTED") == ("FOO TOKEN" if hosts else None)
    shown = made.show(facts)
    assert "# hvdrun sets, to values that are not shown here: FOO\n" in shown
    assert ("# hvdrun sends them: run by hand, this command" in shown) == bool(hosts)


def test_a_variable_in_mpi_args_that_is_not_set_is_an_error():
    with pytest.raises(UsageError, match="-x FOO: the variable is not set here"):
        command(OPENMPI_5, mpi_args=("-x", "FOO"))


BOUND_BY_MPI = {
    OPENMPI_5: f"-np 2 -H localhost:2 --map-by slot --bind-to l3cache {TRANSPORTS}",
    OPENMPI_4: f"-np 2 -H localhost:2 --map-by slot --bind-to l3cache {TRANSPORTS}",
    MPICH_5: "-np 2 -rmk user -hosts localhost:2 --bind-to l3cache -launcher fork -genvall",
    INTEL_2021: "-bootstrap fork --bind-to l3cache -genvall -host localhost -n 2",
}


@pytest.mark.parametrize("flavour", ALL, ids=str)
def test_who_gives_arguments_for_binding_leaves_it_to_mpirun(flavour):
    made = command(flavour, num_proc=2, binding_args=("--bind-to", "l3cache"))
    expected = argv(
        "/venv/bin/mpirun", BOUND_BY_MPI[flavour], AGENT, "unbound-rank python train.py"
    )
    assert made.argv == expected
    assert "I_MPI_PIN" not in made.environment


def test_a_mapping_of_the_users_takes_the_place_of_ours():
    words = ("--map-by", "slot:PE=2")
    assert command(OPENMPI_5, binding_args=words).argv.count("--map-by") == 1


def test_by_default_there_is_a_rank_for_each_slot_gpu_or_core():
    assert command(OPENMPI_5).num_proc == 4
    assert command(OPENMPI_5, facts=replace(FACTS, gpus=2)).num_proc == 2
    assert command(OPENMPI_5, "server1:3,server2:2").num_proc == 5


def test_more_ranks_than_cores_run_and_one_line_says_so():
    assert command(MPICH_5, num_proc=4).notes == ()
    (note,) = command(MPICH_5, num_proc=6).notes
    assert note == "6 processes on localhost, which has 4 cores: they share them"
    assert command(MPICH_5, "server1:6").notes == ()


OTHER = HostFacts(
    hostname="b",
    python="3.11.7",
    machine="x86_64",
    packages={},
    mpirun=None,
    mpirun_missing="",
    cwd="",
    program="",
    script=None,
    cores=16,
    gpus=0,
    memory_bytes=None,
    shm=SharedMemory(1 << 30, 1 << 30),
    interfaces=(),
    resolved={},
)


def test_a_remote_host_without_a_number_has_what_it_said_and_else_what_this_one_has():
    facts = replace(FACTS, others={"b": OTHER, "c": replace(OTHER, gpus=2)})
    assert [s.count for s in command(MPICH_5, "server1,b,c,d", facts).shares] == [4, 16, 2, 4]
    assert command(MPICH_5, "server1,b,c", facts, num_proc=25).notes == (
        "5 processes on server1, which has 4 cores: they share them",
        "17 processes on b, which has 16 cores: they share them",
        "3 processes on c, which has 2 GPUs: they share them",
    )


def test_without_a_host_list_the_hosts_are_those_of_the_allocation():
    given_by = Allocation("Slurm", (Host("server1", 2), Host("b", 1)))
    assert [s.count for s in command(MPICH_5, allocation=given_by).shares] == [2, 1]
    assert command(MPICH_5, "c:1", allocation=given_by).shares == (Share(Host("c", 1), 1),)
    with pytest.raises(TooManyProcesses, match=r"lower -np, or ask Slurm for more \(--ntasks\)"):
        command(MPICH_5, allocation=given_by, num_proc=4)


def test_processors_that_a_scheduler_gave_count_where_there_are_no_gpus():
    given_by = Allocation("Slurm", (Host("server1", cpus=3), Host("b", cpus=1)))
    assert [s.count for s in command(MPICH_5, allocation=given_by).shares] == [3, 1]
    gpus = replace(FACTS, gpus=8)
    assert [s.count for s in command(MPICH_5, None, gpus, allocation=given_by).shares] == [8, 8]
    assert command(MPICH_5, allocation=given_by, num_proc=6).notes == (
        "4 processes on server1, which has 3 cores: they share them",
        "2 processes on b, which has 1 core: they share it",
    )


@pytest.mark.parametrize(
    ("flavour", "hosts", "options", "expected"),
    [
        (OPENMPI_5, None, {}, "lo"),
        (MPICH_5, None, {}, "lo"),
        (INTEL_2021, None, {}, None),
        (OPENMPI_5, "server1:1,server2:1", {}, None),
        (OPENMPI_5, None, {"exports": {"UCX_NET_DEVICES": "mlx5_0:1"}}, "mlx5_0:1"),
        (OPENMPI_5, None, {"exports": {"UCX_TLS": "tcp"}}, None),
    ],
)
def test_on_one_host_ucx_listens_on_the_loopback_device(flavour, hosts, options, expected):
    made = command(flavour, hosts, num_proc=2, **options)
    assert made.environment.get("UCX_NET_DEVICES") == expected


def test_the_first_host_is_the_master_under_the_name_that_the_user_gave():
    assert command(MPICH_5, "10.0.0.5:1,b:1").environment["MASTER_ADDR"] == "10.0.0.5"
    assert command(MPICH_5, "localhost:1,b:1").environment["MASTER_ADDR"] == "server1"
    assert command(MPICH_5).environment["MASTER_ADDR"] == "127.0.0.1"


def test_all_names_of_this_machine_are_one_host():
    facts = replace(FACTS, user="ann")
    made = command(MPICH_5, "127.0.0.1:2,b:1,ann@SERVER1:1,localhost", facts)
    assert [(s.host.name, s.count) for s in made.shares] == [("server1", 4), ("b", 1)]
    assert made.argv[made.argv.index("-hosts") + 1] == "localhost:4,0.1.0.1:1"
    assert made.argv[made.argv.index("-localhost") + 1] == "server1"


def seen(name, address):
    return facts_of(hostname=name, interfaces=(Interface("eth0", address, 24),))


def test_a_machine_under_several_names_is_one_host_as_far_as_preflight_knows():
    one, other = seen("b", "10.0.0.2"), seen("c", "10.0.0.3")
    here = seen("server1", "10.0.0.1")
    others = {"b": one, "10.0.0.2": one, "c": other, "server1": here, "alias": here, "d": None}
    facts = replace(FACTS, others={name: f for name, f in others.items() if f})
    made = command(OPENMPI_5, "alias:1,b:1,c:1,10.0.0.2:2,server1:1,d:1", facts)
    assert [(s.host.name, s.count) for s in made.shares] == [
        ("server1", 2),
        ("b", 3),
        ("c", 1),
        ("d", 1),
    ]
    # Another port may be another machine behind the same address.
    by_ports = (Host("b", 1, port=22), Host("10.0.0.2", 1, port=23))
    made = build(Request(command=("x",), hosts=by_ports), OPENMPI_5, facts)
    assert [s.host.name for s in made.shares] == ["b", "10.0.0.2"]


@pytest.mark.parametrize("flavour", ALL, ids=str)
def test_mpi_knows_an_ipv6_address_by_a_name(flavour):
    made = command(flavour, "ann@[fd00::1]:2,[fd00::2]:1,[fe80::2%eth0]:1")
    assert not [word for word in made.argv if "::" in word]
    assert [s.host.name for s in made.shares] == ["fd00::1", "fd00::2", "fe80::2%eth0"]
    assert made.environment["MASTER_ADDR"] == "fd00::1"
    hosts, options = [], []
    names = ("ipv6-fd00--1", "ipv6-fd00--2", "ipv6-fe80--2-eth0")
    if flavour.kind == OPENMPI:
        names = ("hvdrun-host-0", "hvdrun-host-1", "hvdrun-host-2")
    if flavour.kind == MPICH:
        names = ("0.1.0.0", "0.1.0.1", "0.1.0.2")
    for name in names:
        assert re.search(rf"(^| |,){re.escape(name)}(:| |,|$)", shlex.join(made.argv))
        host, given = destination(name, made.environment)
        hosts.append(host)
        options.append(given)
    assert hosts == ["fd00::1", "fd00::2", "fe80::2%eth0"]
    assert options[0] == ["-l", "ann", *options[1]]
    assert options[1] == options[2]
    assert "fd00::1" not in options[1]


@pytest.mark.parametrize(
    ("flavour", "option", "names"),
    [
        (OPENMPI_5, "-H", ("hvdrun-host-0", "hvdrun-host-2", "hvdrun-host-21")),
        (MPICH_5, "-hosts", ("0.1.0.0", "0.1.0.2", "0.1.0.21")),
    ],
    ids=str,
)
def test_mpi_gets_names_that_it_cannot_confuse(flavour, option, names):
    """Both take a host for this one if it has its name; Open MPI cuts names at the first dot."""
    made = command(flavour, "job.1-a:1,server1:2,job.1-b:1")
    one, other, more = names
    assert made.argv[made.argv.index(option) + 1] == f"{one}:1,localhost:2,{other}:1"
    assert [destination(n, made.environment)[0] for n in (one, other)] == ["job.1-a", "job.1-b"]
    words = in_users_words(f"no {other}, {one} or {more}, 10.1.0.2, 1.0.1.0.2", ["a", "b", "c"])
    assert words == f"no c, a or {more}, 10.1.0.2, 1.0.1.0.2"


@pytest.mark.parametrize("flavour", ALL, ids=str)
def test_a_long_list_of_hosts_goes_into_a_file(flavour, tmp_path):
    path = tmp_path / "hosts"
    others = [Host(f"b{n:05d}.example.com", 64, user="ann", port=2200) for n in range(1, 10_000)]
    request = Request(("x",), hosts=(Host("server1", 64), *others))
    made = build(request, flavour, replace(FACTS, hosts_path=str(path)))
    assert max(map(len, (*made.argv, *made.environment.values()))) < 16_384
    assert made.hosts_file
    assert made.hosts_file[0] == str(path)
    path.write_text(made.hosts_file[1])
    assert made.show(FACTS).splitlines()[1] == f"cat >{path} <<'END'"
    lines = path.read_text().splitlines()
    local = lines[0]
    assert len(lines) == 1 + 2 * len(others)
    last = re.split("[ :]", lines[-1])[0]
    host, options = destination(last, made.environment)
    assert (host, options[:4]) == ("b09999.example.com", ["-l", "ann", "-p", "2200"])
    expected = {OPENMPI: "localhost slots=64", MPICH: "localhost:64", INTEL: "server1:64"}
    assert local == expected[flavour.kind]
    option = {OPENMPI: "--hostfile", MPICH: "-f"}.get(flavour.kind)
    assert option is None or made.argv[made.argv.index(option) + 1] == str(path)


def test_localhost_needs_a_name_that_means_this_machine():
    facts = replace(FACTS, local_names=FACTS.local_names - {"server1"} | {"10.0.0.1"})
    with pytest.raises(
        HostSetupError, match=r"^/etc/hosts gives server1, this machine's own name,"
    ):
        command(OPENMPI_5, "localhost:1,10.0.0.2:1", facts)
    made = command(OPENMPI_5, "10.0.0.1:1,server1:1", facts)
    assert [destination("hvdrun-host-1", made.environment)[0]] == ["server1"]
    assert made.environment["MASTER_ADDR"] == "10.0.0.1"
    command(OPENMPI_5, "localhost:2", facts)


def test_names_in_a_rank_file_are_the_users():
    by_name = command(OPENMPI_5, "a:1,b:1", binding_args=("--rankfile", "r.txt"))
    assert by_name.argv[by_name.argv.index("-H") + 1] == "a:1,b:1"


def test_hosts_that_call_themselves_the_same_are_an_error_under_open_mpi():
    twins = {"a": seen("node", "10.0.0.2"), "b": seen("node", "10.0.0.3")}
    facts = replace(FACTS, others=twins)
    with pytest.raises(HostSetupError, match=r"a and b both call themselves node .*give one of"):
        command(OPENMPI_5, "a:1,b:1", facts)
    assert command(MPICH_5, "a:1,b:1", facts).num_proc == 2


def test_this_machine_by_its_ipv6_address_has_its_own_name():
    facts = replace(FACTS, local_names=FACTS.local_names | {"fd00::1"})
    made = command(MPICH_5, "[fd00::1]:2,b:1", facts)
    assert made.argv[made.argv.index("-hosts") + 1] == "localhost:2,0.1.0.1:1"
    assert made.argv[made.argv.index("-localhost") + 1] == "server1"
    assert made.environment["MASTER_ADDR"] == "fd00::1"


@pytest.mark.parametrize(
    ("flavour", "hosts", "expected"),
    [(MPICH_5, "a:1,b:1", "inf"), (MPICH_5, "localhost:2", None), (OPENMPI_5, "a:1,b:1", None)],
)
def test_ucx_under_mpich_keeps_idle_connections_to_hosts_that_are_cut_off(flavour, hosts, expected):
    assert command(flavour, hosts).environment.get("UCX_TCP_KEEPIDLE") == expected
    if expected:
        facts = replace(FACTS, environ={"UCX_TCP_KEEPIDLE": "60s"})
        made = command(flavour, hosts, facts=facts)
        assert made.environment["UCX_TCP_KEEPIDLE"] == "60s"


def test_what_is_set_already_stays():
    made = command(MPICH_5, facts=replace(FACTS, environ={"PYTHONUNBUFFERED": "0"}))
    assert made.environment["PYTHONUNBUFFERED"] == "0"


@pytest.mark.parametrize("hosts", [None, "server1:1,server2:1"])
def test_the_address_of_another_job_is_replaced_unless_it_is_given_by_x(hosts):
    facts = replace(FACTS, environ={**FACTS.environ, "MASTER_ADDR": "there", "MASTER_PORT": "1"})
    made = command(OPENMPI_5, hosts, facts).environment
    assert made["MASTER_ADDR"] == ("server1" if hosts else "127.0.0.1")
    assert made["MASTER_PORT"] == "45678"
    exports = {"MASTER_ADDR": None, "MASTER_PORT": "2"}
    made = command(OPENMPI_5, hosts, facts, exports=exports).environment
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("there", "2")


def test_a_ranks_own_number_can_not_be_exported():
    made = command(
        OPENMPI_5,
        exports={"RANK": "5", "LOCAL_RANK": None, "MINE": "1"},
        facts=replace(FACTS, environ={**FACTS.environ, "LOCAL_RANK": "7"}),
    )
    assert made.notes == (
        "-x RANK has no effect: hvdrun sets RANK to what is true of each rank",
        "-x LOCAL_RANK has no effect: hvdrun sets LOCAL_RANK to what is true of each rank",
    )


def test_ssh_never_asks_and_never_waits_for_ever():
    hosts = [*parse_hosts("a:1,ann@b:1"), Host("c", 1, port=2200)]
    options = {"ssh_port": 2222, "ssh_identity_file": "/home/ann/my key"}
    made = build(Request(("true",), hosts=tuple(hosts), **options), OPENMPI_5, FACTS)
    assert made.environment["HVDRUN_HOSTS"] == (
        "hvdrun-host-0 a,hvdrun-host-1 -l ann b,hvdrun-host-2 -p 2200 c"
    )
    assert shlex.split(made.environment["HVDRUN_SSH"]) == [
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=30"),
        *("-o", "ServerAliveInterval=11", "-o", "ServerAliveCountMax=2"),
        *("-o", "ClearAllForwardings=yes", "-o", "RequestTTY=no", "-o", "RemoteCommand=none"),
        *("-p", "2222", "-i", "/home/ann/my key"),
    ]


@pytest.mark.parametrize("host_timeout_s", [2.0, 2.5, 6.0, 30.0, 86_400.0])
def test_ssh_gives_a_silent_host_up_after_hvdrun_does(host_timeout_s):
    """ssh asks each interval, and ends with the third question that would follow two unanswered."""
    request = Request(("true",), hosts=tuple(parse_hosts("a:1,b:1")), host_timeout_s=host_timeout_s)
    words = shlex.split(build(request, OPENMPI_5, FACTS).environment["HVDRUN_SSH"])
    given = dict(word.split("=") for word in words if "=" in word)
    after_s = int(given["ServerAliveInterval"]) * (int(given["ServerAliveCountMax"]) + 1)
    assert host_timeout_s + 1 <= after_s <= host_timeout_s + 4
    assert int(given["ConnectTimeout"]) >= host_timeout_s


def test_an_export_that_is_not_set_is_an_error():
    with pytest.raises(UsageError, match="-x NOPE: the variable is not set here"):
        command(MPICH_5, exports={"NOPE": None})


def test_ranks_are_found_on_the_hosts_where_they_were_placed():
    made = command(MPICH_5, "a:3,b:1")
    assert [made.host_of(rank) for rank in range(4)] == ["a", "a", "a", "b"]
    assert made.ranks_of("b") == range(3, 4)
    with pytest.raises(IndexError):
        made.host_of(4)


def test_a_colon_as_an_argument_does_not_divide_the_command():
    words = ("prog", ":", "\\:", "\\", "a:b", "")
    assert ":" not in escape(words)
    assert unescape(escape(words)) == list(words)


SLURM = Allocation("Slurm", (Host("server1", 2), Host("b", 1), Host("c", 1)))
IN_JOB = replace(FACTS, starter=Srun("/usr/bin/srun"))
CONNECTION = (
    "/usr/bin/srun --overlap --nodes=1 --ntasks=1 --mpi=none --cpu-bind=none --quiet --unbuffered"
    " --kill-on-bad-exit=0"
    " --export=PATH,LD_LIBRARY_PATH,HOME,USER,LOGNAME,SHELL,LANG,TMPDIR '--nodelist={host}'"
)


def test_in_an_allocation_of_slurms_srun_stands_in_sshs_place():
    made = command(OPENMPI_5, facts=IN_JOB, allocation=SLURM)
    assert made.environment["HVDRUN_REACH"] == CONNECTION
    assert made.environment["HVDRUN_HOSTS"] == "hvdrun-host-1 b,hvdrun-host-2 c"
    assert argv("-H localhost:2,hvdrun-host-1:1,hvdrun-host-2:1 --map-by slot") == made.argv[3:7]
    assert made.argv[made.argv.index("ras") + 1] == "^slurm,pbs,tm,lsf,gridengine"


@pytest.mark.parametrize(
    ("hosts", "options"),
    [("b,d", {}), ("ann@b,c", {}), ("b,c", {"ssh_port": 22}), (None, {"ssh_identity_file": "/k"})],
)
def test_where_slurm_cannot_reach_a_host_or_ssh_is_set_up_it_is_ssh(hosts, options):
    made = command(OPENMPI_5, hosts, IN_JOB, allocation=SLURM, **options)
    assert "HVDRUN_SSH" in made.environment
    assert "HVDRUN_REACH" not in made.environment


@pytest.mark.parametrize("flavour", [OPENMPI_5, MPICH_5], ids=str)
def test_the_whole_command_line_where_srun_starts_the_ranks(flavour):
    pmi = {OPENMPI: "pmix", MPICH: "pmi2"}[flavour.kind]
    by_srun = replace(flavour, starter=Srun("/usr/bin/srun", pmi))
    made = command(by_srun, facts=IN_JOB, allocation=SLURM)
    assert made.argv == argv(
        f"/usr/bin/srun --mpi={pmi} --ntasks=4 --nodes=3 --distribution=block",
        "--cpu-bind=none --overcommit --overlap",
        "--kill-on-bad-exit=0 --wait=0 --export=ALL --input=none --quiet",
        f"'--chdir=/home/ann/my job' {AGENT} rank python train.py",
    )
    # hvdrun has a connection of its own to every other host.
    assert made.connections == (argv(f"{AGENT} ssh b"), argv(f"{AGENT} ssh c"))
    assert made.environment["HVDRUN_REACH"] == CONNECTION
    assert f"# meanwhile, for signs of life: {AGENT} ssh b\n" in made.show(FACTS)


def test_a_step_has_as_many_processors_for_a_task_as_the_job():
    facts = replace(IN_JOB, environ={**FACTS.environ, "SLURM_CPUS_PER_TASK": "3"})
    by_srun = replace(MPICH_5, starter=Srun("/usr/bin/srun", "pmi2"))
    assert "--cpus-per-task=3" in command(by_srun, facts=facts, allocation=SLURM).argv


def test_under_srun_the_arguments_for_binding_are_sruns():
    by_srun = replace(MPICH_5, starter=Srun("/usr/bin/srun", "pmi2"))
    words = ("--cpu-bind=cores", "--threads-per-core=1")
    made = command(by_srun, facts=IN_JOB, allocation=SLURM, binding_args=words)
    begin = made.argv.index("--cpu-bind=cores")
    assert made.argv[begin : begin + 3] == (*words, "--overcommit")
    assert "--cpu-bind=none" not in made.argv


def test_srun_knows_every_host_by_slurms_name():
    same = seen("machine", "10.0.0.1")
    facts = replace(IN_JOB, others=dict.fromkeys("bc", same))
    by_srun = replace(MPICH_5, starter=Srun("/usr/bin/srun", "pmi2"))
    made = command(by_srun, facts=facts, allocation=SLURM)
    assert [s.host.name for s in made.shares] == ["server1", "b", "c"]


def test_srun_is_not_told_how_many_tasks_the_job_has_on_a_node():
    facts = replace(IN_JOB, environ={**FACTS.environ, "SLURM_NTASKS_PER_NODE": "1"})
    by_srun = replace(MPICH_5, starter=Srun("/usr/bin/srun", "pmi2"))
    name = "SLURM_NTASKS_PER_NODE"
    assert name not in command(by_srun, facts=facts, allocation=SLURM).environment
    assert command(MPICH_5, facts=facts, allocation=SLURM).environment[name] == "1"
