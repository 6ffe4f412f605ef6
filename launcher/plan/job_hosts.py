"""The hosts of a job, and how many ranks each gets. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdrun.errors import HostSetupError, UsageError
from hvdrun.plan.facts import LOOPBACK, LocalFacts, is_local
from hvdrun.plan.flavour import Flavour
from hvdrun.plan.hosts import Host, Share, merge, place
from hvdrun.plan.request import Request
from hvdrun.plan.schedulers import remedy


def hosts_of(request: Request) -> tuple[Host, ...]:
    given = request.hosts or (request.allocation.hosts if request.allocation else ())
    return given or (Host("localhost"),)


def with_hosts_in_use(request: Request, facts: LocalFacts) -> Request:
    """The request without hosts that get no rank, as far as that is known before preflight: hvdrun
    need not wait for them.

    Raises TooManyProcesses, or UsageError for another user on this machine, as no MPI starts ranks
    as another user there.
    """
    hosts = hosts_of(request)
    for host in hosts:
        if host.name.lower() in facts.local_names and not is_local(host, facts):
            raise UsageError(
                f"{host.user}@{host.name} is the machine that hvdrun runs on, where ranks run as"
                f" {facts.user}: leave the user out, or start hvdrun as {host.user}"
            )
    if request.num_proc is None or any(host.slots is None for host in hosts):
        return request
    shares = place(hosts, request.num_proc, lambda _: 0, _remedy(request))
    return replace(request, hosts=tuple(share.host for share in shares))


def is_remote(request: Request, facts: LocalFacts) -> bool:
    return any(not is_local(host, facts) for host in hosts_of(request))


def is_started_everywhere(request: Request) -> bool:
    """Whether each host of the job has started an hvdrun of its own."""
    return request.allocation is not None and request.allocation.reach is not None


def place_ranks(request: Request, flavour: Flavour, facts: LocalFacts) -> tuple[Share, ...]:
    hosts = hosts_of(request)
    if flavour.starter is None:  # a starter knows a host only by its scheduler's name
        hosts = _by_machine(hosts, facts)
    return place(
        hosts, request.num_proc, lambda host: facts.default_slots(host)[0], _remedy(request)
    )


def _remedy(request: Request) -> str:
    return remedy(request.allocation) if request.allocation and not request.hosts else ""


def _by_machine(hosts: Sequence[Host], facts: LocalFacts) -> tuple[Host, ...]:
    """Makes one host of a machine that is listed under several names, under the first of them: two
    of Open MPI's daemons on one machine would disturb each other. For this machine, a name that
    needs no ssh comes first."""
    own = [replace(h, user=None, port=None) if is_local(h, facts) else h for h in hosts]
    names: dict[object, str] = {}
    for host in sorted(own, key=lambda host: not is_local(host, facts)):
        names.setdefault(_machine(host, facts), host.name)
    return merge((replace(host, name=names[_machine(host, facts)]), host.name) for host in own)


def _machine(host: Host, facts: LocalFacts) -> object:
    """A key that is equal for names of the same machine with the same user and port."""
    seen = facts.others.get(host.name)
    if seen is None or not seen.interfaces:
        return is_local(host, facts) or host.name
    return seen.hostname, seen.interfaces, host.user, host.port


def check_this_host(shares: Sequence[Share], facts: LocalFacts) -> None:
    """Raises HostSetupError if the other hosts can't be told a name of this machine."""
    if any(share.host.name in LOOPBACK for share in shares) and not is_local(
        Host(facts.hostname), facts
    ):
        raise HostSetupError(
            f"/etc/hosts gives {facts.hostname}, this machine's own name, an address that this"
            " machine has not, and other hosts can't reach it as localhost; correct that line, or"
            " list this machine by its address, as in -H 10.0.0.1:2"
        )


def check_own_names(hosts: Sequence[Host], facts: LocalFacts) -> None:
    """Raises HostSetupError if two machines call themselves the same, as far as preflight knows:
    Open MPI takes their ranks for ranks of one host."""
    first: dict[str, tuple[str, object]] = {}
    for host in hosts:
        if not (seen := facts.others.get(host.name)):
            continue
        other, interfaces = first.setdefault(seen.hostname, (host.name, seen.interfaces))
        if interfaces != seen.interfaces:
            raise HostSetupError(
                f"{other} and {host.name} both call themselves {seen.hostname} (`hostname`), so"
                " Open MPI can't tell them apart; give one of them another name (`hostnamectl"
                " hostname NAME`), or run the job under MPICH (--mpi mpich)"
            )


def notes_on(shares: tuple[Share, ...], facts: LocalFacts) -> tuple[str, ...]:
    notes = []
    for share in shares:
        slots, what = facts.default_slots(share.host)
        if share.host.slots is None and share.count > slots:
            notes.append(
                f"{share.count} processes on {share.host.name}, which has {slots} {what}"
                f"{'s' if slots > 1 else ''}: they share {'them' if slots > 1 else 'it'}"
            )
    return tuple(notes)
