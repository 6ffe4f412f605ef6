"""The chosen networks as options of each MPI, and as variables for NCCL, Gloo and others; and
whether this machine has those that the user has chosen."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address, ip_network

from hvdrun.errors import HostSetupError
from hvdrun.machine.interfaces import interfaces
from hvdrun.plan.facts import HostFacts, LocalFacts
from hvdrun.plan.flavour import OPENMPI, Flavour
from hvdrun.plan.job_hosts import hosts_of, is_remote
from hvdrun.plan.request import Request
from hvdrun.preflight.networks import Choice, subnet_of
from hvdrun.preflight.question import control_name


def interface_options(
    flavour: Flavour, choice: Choice, request: Request, facts: LocalFacts
) -> tuple[tuple[str, ...], dict[str, str]]:
    """mpirun's options, and variables for the ranks. Empty if every interface will do; the user's
    own settings stay."""
    if not choice.matters and not request.network_interfaces:
        return (), {}
    name = choice.common_name
    variables = {}
    if name:
        # Gloo needs a name that every host has; NCCL uses those that it finds.
        variables["GLOO_SOCKET_IFNAME"] = name
    if choice.names:
        variables["NCCL_SOCKET_IFNAME"] = "=" + ",".join(choice.names)
    if name and not facts.has_fabric:
        # MPIs send through these without a fabric; with one, they would exclude the fabric.
        variables["UCX_NET_DEVICES"] = name
        variables["FI_TCP_IFACE"] = name
    if flavour.starter:
        # It has no option for interfaces.
        if flavour.kind == OPENMPI and choice.subnets:
            variables["OMPI_MCA_btl_tcp_if_include"] = ",".join(choice.subnets)
        return (), variables
    if flavour.kind == OPENMPI:
        return _openmpi(flavour, choice, request, facts.environ), variables
    if name and "-iface" not in request.mpi_args:
        return ("-iface", name), variables
    return (), variables


def daemons_call(
    flavour: Flavour,
    choice: Choice,
    request: Request,
    facts: LocalFacts,
    hosts: Mapping[str, HostFacts],
    here: HostFacts,
) -> dict[str, list[str]]:
    """By host: the addresses at which MPI's daemon there looks for mpirun here. One must do."""
    if flavour.starter:
        return {}
    if flavour.kind == OPENMPI:
        subnets = choice.control if choice.matters else ()
        own = [
            found.address
            for found in here.interfaces
            if found.up
            and ip_address(found.address).version == 4
            and (not subnets or subnet_of(found) in subnets)
        ]
        return dict.fromkeys(hosts, own)
    options, _ = interface_options(flavour, choice, request, facts)
    if "-iface" in options:
        named = [found.address for found in here.interfaces if found.name == options[-1]]
        return dict.fromkeys(hosts, named)
    name = control_name(hosts_of(request), facts)
    return {host: [name, *known.resolved.get(name, ())] for host, known in hosts.items()}


def _openmpi(
    flavour: Flavour, choice: Choice, request: Request, environ: Mapping[str, str]
) -> tuple[str, ...]:
    options: list[str] = []
    control = "--prtemca" if flavour.major >= 5 else "--mca"
    wanted: Iterable[tuple[str, str, tuple[str, ...]]] = (
        ("--mca", "btl_tcp_if", choice.subnets),
        (control, "oob_tcp_if", choice.control),
    )
    for option, stem, subnets in wanted:
        names = (f"{stem}_include", f"{stem}_exclude")
        given = any(
            name in request.mpi_args or f"{prefix}_MCA_{name}" in environ
            for name in names
            for prefix in ("OMPI", "PRTE")
        )
        if subnets and not given:
            options += [option, names[0], ",".join(subnets)]
    return tuple(options)


def check_own(request: Request, facts: LocalFacts) -> None:
    """Raises HostSetupError if none of `--network-interfaces` is of this machine, loopback
    included."""
    wanted = request.network_interfaces  # names, addresses or subnets
    if is_remote(request, facts):
        return
    names = [name for _, name in socket.if_nameindex()]
    addresses = ["127.0.0.1", "::1", *(str(found["address"]) for found in interfaces())]
    if not any(_is_here(word, names, addresses) for word in wanted):
        raise HostSetupError(
            f"--network-interfaces {','.join(wanted)}: this machine has no such interface; it has "
            f"{', '.join(names)} (`ip address` lists their addresses)"
        )


def _is_here(word: str, names: Sequence[str], addresses: Sequence[str]) -> bool:
    if "/" in word:
        return any(ip_address(own) in ip_network(word, strict=False) for own in addresses)
    return word in names or word in addresses
