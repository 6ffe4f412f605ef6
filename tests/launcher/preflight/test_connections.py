"""Which hosts connect to which before a job starts, and what hvdrun concludes from the results."""

from dataclasses import replace

import pytest

from hvdrun.agent.connecting import CONNECTED, NO_ROUTE, REFUSED, SILENT, UNPROVEN
from hvdrun.errors import HostSetupError
from hvdrun.plan.facts import Interface
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.plan.request import Request
from hvdrun.preflight.connections import (
    HERE,
    Connection,
    between_ranks,
    judge,
    of_daemons,
    places,
    useless_subnets,
)
from hvdrun.preflight.interface_options import daemons_call
from hvdrun.preflight.networks import choose
from hvdrun.preflight.ports import Ports, Range, ports_of
from tests.launcher.plan.test_command import FACTS
from tests.launcher.preflight.answers import facts_of

PORTS = Ports(Range(1024, 65534), Range(), "--mpi-args …")
FLAVOURS = {kind: Flavour(kind, "5.0.2", "mpirun") for kind in (OPENMPI, MPICH, INTEL)}


def hosts(count=2, second=False):
    """h1 … in 10.0.0.0/24, if wanted also in 10.9.0.0/16. hvdrun runs on h1."""
    found = {}
    for i in range(1, count + 1):
        interfaces = [Interface("eth0", f"10.0.0.{i}", 24)]
        interfaces += [Interface("ib0", f"10.9.0.{i}", 16)] if second else []
        found[f"h{i}"] = facts_of(
            hostname=f"h{i}",
            interfaces=tuple(interfaces),
            ssh_address="" if i == 1 else f"10.0.0.{i}",
            ssh_client="" if i == 1 else "10.0.0.1",
        )
    return found


def planned(job, local=("h1",)):
    return between_ranks(job, local, choose(job, job["h1"], {}), PORTS)


def findings(job, results, **changes):
    given = {"local": ("h1",), "left_out": (), "ranks_need_tcp": True, **changes}
    return list(judge(list(job), results=results, ports=PORTS, hostname="h1.site", **given))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_few_hosts_all_connect_to_each_other(count):
    assert places(count) == {(i, j) for i in range(count) for j in range(count) if i != j}


@pytest.mark.parametrize("count", [6, 17, 64, 100])
def test_many_hosts_are_joined_wherever_a_firewall_divides_them(count):
    pairs = places(count)
    assert all((j, i) in pairs for i, j in pairs)
    assert all((0, i) in pairs for i in range(1, count))
    most = max(sum(1 for i, _ in pairs if i == host) for host in range(1, count))
    assert most <= 2 * count.bit_length() + 1
    for size in range(1, count):
        for group in (set(range(size)), set(range(0, count, size + 1)) or {0}):
            if len(group) < count:
                assert any(i in group and j not in group for i, j in pairs)


def test_two_hosts_connect_both_ways_to_the_ports_of_ranks():
    assert planned(hosts()) == [
        Connection(HERE, "h2", "10.0.0.2", PORTS.ranks, "10.0.0.0/24"),
        Connection("h2", HERE, "10.0.0.1", PORTS.ranks, "10.0.0.0/24"),
    ]


def test_two_names_of_a_machine_are_one_end():
    job = hosts(2)
    job["h2.site"] = job["h2"]
    assert planned(job) == planned(hosts(2))


def test_hosts_in_different_subnets_connect_over_what_the_other_one_has():
    job = hosts()
    job["h2"] = replace(
        job["h2"], interfaces=(Interface("eth0", "10.0.7.2", 24),), ssh_address="10.0.7.2"
    )
    assert [c.address for c in planned(job)] == ["10.0.7.2", "10.0.0.1"]


def test_only_networks_that_mpi_gets_are_tried():
    job = hosts()
    docker = Interface("docker0", "172.17.0.1", 16)
    job = {name: replace(f, interfaces=(*f.interfaces, docker)) for name, f in job.items()}
    assert {c.subnet for c in planned(job)} == {"10.0.0.0/24"}


def test_daemons_call_hvdruns_machine_also_if_it_has_no_ranks():
    job = hosts(3)
    here = job.pop("h1")
    calls = {key: ["10.0.0.1", "192.168.1.1"] for key in job}
    found = of_daemons(job, (), here, calls, PORTS)
    assert [(c.source, c.target, c.address, c.ports) for c in found] == [
        ("h2", HERE, "10.0.0.1", Range()),
        ("h3", HERE, "10.0.0.1", Range()),
    ]


@pytest.mark.parametrize("kind", FLAVOURS)
def test_each_mpis_daemons_look_for_mpirun_where_that_mpi_says(kind):
    job = hosts(2, second=True)
    job["h2"] = replace(job["h2"], resolved={"server1": ("10.0.0.1",)})
    choice = choose(job, job["h1"], {})
    facts = replace(FACTS, hostname="server1")
    found = daemons_call(FLAVOURS[kind], choice, Request(("true",)), facts, job, job["h1"])
    expected = ["10.0.0.1", "10.9.0.1"] if kind == OPENMPI else ["server1", "10.0.0.1"]
    assert found["h2"] == expected
    assert daemons_call(replace(FLAVOURS[kind], starter="srun"), choice, *[None] * 4) == {}


def test_hosts_that_reach_each_other_have_good_findings():
    job = hosts(3)
    found = findings(job, dict.fromkeys(planned(job), CONNECTED))
    assert [(f.host, f.verdict, f.text) for f in found] == [
        ("h1", "ok", "TCP between it and h2, h3"),
        ("h2", "ok", "TCP between it and h1, h3"),
        ("h3", "ok", "TCP between it and h1, h2"),
    ]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (SILENT, "no answer, so a firewall drops the packets"),
        (REFUSED, "refused, so a firewall rejects the packets"),
        (NO_ROUTE, "there is no route, or a firewall rejects the packets"),
        (UNPROVEN, "it accepts the connection, but sends nothing"),
    ],
)
def test_a_firewall_on_one_host_is_said_with_who_can_not_connect_and_why(result, words):
    job = hosts(3)
    results = {c: result if c.target == "h2" else CONNECTED for c in planned(job)}
    bad = [finding for finding in findings(job, results) if finding.remedy]
    assert [(f.host, f.failure) for f in bad] == [("h2", HostSetupError)]
    assert bad[0].text == f"h1, h3 can't connect to 10.0.0.2 over TCP: {words}"
    assert "open TCP between the hosts, both ways (ranks listen on ports 1024-65534" in (
        bad[0].remedy
    )
    assert "--network-interfaces" in bad[0].remedy
    assert PORTS.limit in bad[0].remedy


def test_with_a_fast_network_ranks_may_do_without_tcp_but_daemons_not():
    job = hosts()
    ranks = dict.fromkeys(planned(job), SILENT)
    assert {f.verdict for f in findings(job, ranks, ranks_need_tcp=False)} == {"warning"}
    calls = of_daemons(job, ("h1",), job["h1"], {"h2": ["10.0.0.1"]}, PORTS)
    (bad,) = [
        f for f in findings(job, dict.fromkeys(calls, SILENT), ranks_need_tcp=False) if f.remedy
    ]
    assert (bad.host, bad.failure) == ("h1", HostSetupError)
    assert bad.text.startswith("h2 can't connect to 10.0.0.1")


def test_a_machine_without_ranks_is_said_by_its_name_with_the_first_host():
    job = hosts(3)
    here = job.pop("h1")
    calls = of_daemons(job, (), here, {key: ["10.0.0.1"] for key in job}, PORTS)
    results = {c: SILENT if c.source == "h3" else CONNECTED for c in calls}
    good = findings(job, dict.fromkeys(calls, CONNECTED), local=())
    assert {f.host: f.text for f in good} == {
        "h2": "TCP between it and h1.site",
        "h3": "TCP between it and h1.site",
    }
    (bad,) = [f for f in findings(job, results, local=()) if f.remedy]
    assert (bad.host, bad.failure) == ("h2", HostSetupError)
    assert bad.text.startswith("h3 can't connect to 10.0.0.1")


def test_one_of_several_addresses_of_mpirun_must_do():
    job = hosts(2, second=True)
    calls = of_daemons(job, ("h1",), job["h1"], {"h2": ["10.0.0.1", "10.9.0.1"]}, PORTS)
    results = dict(zip(calls, (SILENT, CONNECTED), strict=True))
    assert not [finding for finding in findings(job, results) if finding.remedy]


def test_a_network_that_does_not_connect_all_is_left_out_if_another_one_does():
    job = hosts(3, second=True)
    results = {c: SILENT if c.address == "10.0.0.3" else CONNECTED for c in planned(job)}
    useless = useless_subnets(results, "h1")
    assert useless == {"10.0.0.0/24": "h1 can't connect to 10.0.0.3"}
    assert not [f for f in findings(job, results, left_out=useless) if f.remedy]
    choice = choose(job, job["h1"], {}, (), useless)
    assert choice.subnets == ("10.9.0.0/16",)
    assert choice.matters
    assert choice.control == ()  # no subnet of ssh's is left, so MPI tries all


def test_networks_that_each_connect_only_some_stay():
    job = hosts(3, second=True)
    broken = {("10.0.0.2", "10.0.0.0/24"), ("10.9.0.3", "10.9.0.0/16")}
    results = {c: SILENT if (c.address, c.subnet) in broken else CONNECTED for c in planned(job)}
    assert useless_subnets(results, "h1") == {}
    assert {f.verdict for f in findings(job, results)} == {"ok", "warning"}


def test_the_user_who_has_chosen_a_network_that_fails_in_part_is_warned():
    job = hosts(2, second=True)
    results = {c: SILENT if c.address == "10.9.0.2" else CONNECTED for c in planned(job)}
    (bad,) = [f for f in findings(job, results) if f.remedy]
    assert (bad.host, bad.verdict) == ("h2", "warning")
    assert bad.text.endswith("; over another network it can")


@pytest.mark.parametrize(
    ("kind", "mpi_args", "environ", "ranks", "control"),
    [
        (OPENMPI, "", {}, Range(1024, 65534), Range()),
        (
            OPENMPI,
            "--mca btl_tcp_port_min_v4 40000 --mca btl_tcp_port_range_v4 100",
            {"PRTE_MCA_oob_tcp_dynamic_ipv4_ports": "41000-41099"},
            Range(40000, 40099),
            Range(41000, 41099),
        ),
        (
            OPENMPI,
            "--mca btl_tcp_port_min_v4 x",
            {"OMPI_MCA_btl_tcp_port_min_v4": "2000"},
            Range(1024, 65534),
            Range(),
        ),
        (MPICH, "", {}, Range(), Range()),
        (
            MPICH,
            "",
            {"UCX_TCP_PORT_RANGE": "4000-4100", "MPIEXEC_PORT_RANGE": "5000:5100"},
            Range(4000, 4100),
            Range(5000, 5100),
        ),
        (INTEL, "", {"MPICH_PORT_RANGE": "99999:3"}, Range(), Range()),
    ],
)
def test_the_ports_are_those_of_the_mpi_or_the_users(kind, mpi_args, environ, ranks, control):
    request = Request(("true",), mpi_args=tuple(mpi_args.split()))
    found = ports_of(FLAVOURS[kind], request, environ)
    assert (found.ranks, found.control) == (ranks, control)
