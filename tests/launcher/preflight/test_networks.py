"""Which networks the ranks use, and what each MPI is told."""

from dataclasses import replace

import pytest

from hvdrun.plan.facts import Interface
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.plan.request import Request
from hvdrun.preflight.interface_options import interface_options
from hvdrun.preflight.networks import Choice, choose, to_try
from tests.launcher.plan.test_command import FACTS
from tests.launcher.preflight.answers import facts_of

DOCKER = Interface("docker0", "172.17.0.1", 16)


def eth(number, name="eth0", **state):
    return Interface(name, f"10.0.0.{number}", 24, **state)


def hosts(*interfaces, proven=True):
    """h1, h2, … with these; ssh came from h1 to their first ones."""
    first = [found[0].address for found in interfaces]
    return {
        f"h{i}": facts_of(
            hostname=f"h{i}",
            interfaces=tuple(found),
            ssh_address=first[i - 1] if proven and i > 1 else "",
            ssh_client=first[0] if proven and i > 1 else "",
        )
        for i, found in enumerate(interfaces, 1)
    }


def chosen(job, reached=None, wanted=()):
    return choose(job, job["h1"], reached or {}, wanted)


def reasons(choice):
    return {(host, found.name): why for host, found, why in choice.excluded}


def test_the_network_through_which_ssh_came_is_used_and_all_is_left_alone():
    choice = chosen(hosts([eth(1)], [eth(2)]))
    assert (choice.subnets, choice.control) == (("10.0.0.0/24",), ("10.0.0.0/24",))
    assert not choice.matters
    assert interface_options(FLAVOURS[0], choice, Request(("true",)), FACTS) == ((), {})


def test_an_address_that_two_hosts_have_leads_nowhere():
    job = hosts([eth(1), DOCKER], [eth(2), DOCKER])
    choice = chosen(job)
    assert choice.subnets == ("10.0.0.0/24",)
    assert choice.matters
    assert reasons(choice)["h2", "docker0"] == "h1 and h2 have the same address 172.17.0.1"
    assert to_try(job, job["h1"]) == []


def test_one_host_under_two_names_has_no_twin():
    twice = hosts([eth(1)], [eth(2), Interface("ib0", "10.9.0.2", 16)])
    twice["h2.local"] = twice["h2"]
    twice["h1"] = replace(twice["h1"], interfaces=(eth(1), Interface("ib0", "10.9.0.1", 16)))
    assert chosen(twice).subnets == ("10.0.0.0/24", "10.9.0.0/16")


def test_a_subnet_that_is_not_on_every_host_is_left_out():
    choice = chosen(hosts([eth(1), DOCKER], [eth(2)]))
    assert reasons(choice) == {("h1", "docker0"): "172.17.0.0/16 is only on h1"}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"up": False}, "it is switched off"),
        ({"running": False}, "nothing is connected to it"),
        ({"tunnel": True}, "it is a tunnel"),
    ],
    ids=str,
)
def test_an_interface_that_carries_nothing_is_left_out(state, why):
    fast = [Interface("fast", f"10.9.0.{i}", 16, **state) for i in (1, 2)]
    choice = chosen(hosts([eth(1), fast[0]], [eth(2), fast[1]]))
    assert set(reasons(choice).values()) == {why}
    assert choice.matters == state.get("up", True)


def test_but_not_if_ssh_came_through_it():
    choice = chosen(hosts([eth(1, tunnel=True)], [eth(2, tunnel=True)]))
    assert choice.subnets == ("10.0.0.0/24",)


@pytest.mark.parametrize("answers", [True, False])
def test_a_second_network_is_used_if_all_answer_there(answers):
    second = [Interface(name, f"10.9.0.{i}", 16) for i, name in ((1, "ib0"), (2, "ib1"))]
    job = hosts([eth(1), second[0]], [eth(2), second[1]])
    assert to_try(job, job["h1"]) == [("10.9.0.0/16", ["10.9.0.2"])]
    choice = chosen(job, {"10.9.0.0/16": answers})
    assert ("10.9.0.0/16" in choice.subnets) == answers
    assert choice.control == ("10.0.0.0/24",)
    if not answers:
        assert reasons(choice)["h2", "ib1"] == "nothing answers in 10.9.0.0/16"


def test_hosts_in_different_subnets_meet_where_ssh_went():
    job = hosts([eth(1)], [Interface("eth0", "10.0.7.2", 24)])
    assert set(chosen(job).subnets) == {"10.0.0.0/24", "10.0.7.0/24"}


def test_behind_a_translated_address_mpi_itself_finds_the_way_back():
    job = hosts([eth(1)], [eth(2)])
    job["h2"] = replace(job["h2"], ssh_client="192.0.2.77")
    assert chosen(job).control == ()


@pytest.mark.parametrize("words", [("ib0",), ("10.9.0.0/16",), ("10.9.0.1", "10.9.0.2")], ids=str)
def test_what_the_user_names_is_used_and_nothing_else(words):
    second = [Interface("ib0", f"10.9.0.{i}", 16, tunnel=True) for i in (1, 2)]
    choice = chosen(hosts([eth(1), second[0]], [eth(2), second[1]]), wanted=words)
    assert choice.subnets == ("10.9.0.0/16",)
    assert choice.without == ()
    assert chosen(hosts([eth(1), second[0]], [eth(2)]), wanted=words).without == ("h2",)


FLAVOURS = [
    Flavour(OPENMPI, "5.0.11", "mpirun"),
    Flavour(OPENMPI, "4.1.4", "mpirun"),
    Flavour(MPICH, "5.0.2", "mpirun"),
    Flavour(INTEL, "2021.13", "mpirun"),
]
RANKS_GET = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
NO_FABRIC = {"UCX_NET_DEVICES": "eth0", "FI_TCP_IFACE": "eth0"}
SUBNET = "10.0.0.0/24"


@pytest.mark.parametrize(
    ("flavour", "options"),
    [
        (
            FLAVOURS[0],
            ["--mca", "btl_tcp_if_include", SUBNET, "--prtemca", "oob_tcp_if_include", SUBNET],
        ),
        (
            FLAVOURS[1],
            ["--mca", "btl_tcp_if_include", SUBNET, "--mca", "oob_tcp_if_include", SUBNET],
        ),
        (FLAVOURS[2], ["-iface", "eth0"]),
        (FLAVOURS[3], ["-iface", "eth0"]),
    ],
    ids=str,
)
def test_each_mpi_is_told_in_its_own_words(flavour, options):
    choice = chosen(hosts([eth(1), DOCKER], [eth(2), DOCKER]))
    request = Request(("true",))
    told = interface_options(flavour, choice, request, FACTS)
    assert told == (tuple(options), {**RANKS_GET, **NO_FABRIC})
    fabric = replace(FACTS, has_fabric=True)
    assert interface_options(flavour, choice, request, fabric) == (tuple(options), RANKS_GET)


def test_names_that_differ_are_no_use_to_whoever_wants_one():
    choice = chosen(hosts([eth(1), DOCKER], [eth(2, "eno1"), DOCKER]))
    options, variables = interface_options(FLAVOURS[2], choice, Request(("true",)), FACTS)
    assert (options, variables) == ((), {"NCCL_SOCKET_IFNAME": "=eth0,eno1"})


def test_what_the_user_has_told_open_mpi_stands():
    choice = chosen(hosts([eth(1), DOCKER], [eth(2), DOCKER]))
    request = Request(("true",), mpi_args=("--mca", "btl_tcp_if_exclude", "docker0"))
    environ = {"PRTE_MCA_oob_tcp_if_include": "eth0"}
    facts = replace(FACTS, environ=environ)
    assert interface_options(FLAVOURS[0], choice, request, facts)[0] == ()


def test_without_hosts_nothing_is_chosen():
    assert not Choice().matters
