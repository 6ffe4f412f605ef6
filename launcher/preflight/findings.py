"""Judges a host's answer: a finding per check, with a remedy if something is wrong. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from hvdrun.agent.probe import MPI_PACKAGES
from hvdrun.errors import CommandNotFound, HostSetupError, LaunchError
from hvdrun.plan.facts import HostFacts, Temporary
from hvdrun.plan.flavour import NAMES, recognise
from hvdrun.plan.shared_memory import fit, leftovers, size
from hvdrun.preflight.networks import Choice

CLOCK_SKEW_S = 5.0
MEMORY_PER_RANK_BYTES = 256 << 20  # what a rank needs to import torch
# What Open MPI's daemon needs in its folder; and what is so little that other programs will fail.
TEMPORARY_BYTES, TEMPORARY_FILES = 1 << 20, 32
SPARE_TEMPORARY_BYTES = 16 << 20
# With different versions of these, a job may fail in ways that are hard to understand.
SAME_EVERYWHERE = ("hvdlite", "mpi4py", *MPI_PACKAGES)
PACKAGES = (*SAME_EVERYWHERE, "torch")

OURS = "hvdlite"
# It is on no index: a package of that name there is a stranger's.
_SAME_FILES = (
    "copy hvdlite's folder from here to {host} and run `pip install .` in it there, or share this"
    " environment"
)


@dataclass(frozen=True)
class Finding:
    host: str
    what: str  # was checked
    text: str
    remedy: str = ""  # if something is wrong
    failure: type[LaunchError] | None = None  # why the job can't run

    @property
    def verdict(self) -> str:
        return "failed" if self.failure else "warning" if self.remedy else "ok"


@dataclass(frozen=True)
class Expected:
    """The values that each host is compared with, and the things that it needs."""

    here: HostFacts  # this machine, even if it runs no ranks
    python: str
    mpi: str  # name and version
    mpi_kind: str
    mpirun: str
    cwd: str
    program: str
    script: str | None
    variables: Mapping[str, str]  # the ranks'
    # Host names that every host should resolve, with their addresses if these are known; and
    # those of them that the MPI needs.
    names: Mapping[str, frozenset[str]]
    needed_names: frozenset[str]
    needs_temporary: bool  # MPI's daemon writes to the folder for temporary files


def judge(
    host: str, facts: HostFacts, expected: Expected, ranks: int, arrived: str
) -> list[Finding]:
    """All findings of one host, also the good ones; not those of its network. `ranks`: the most
    that it will have."""
    findings = [Finding(host, "ssh", arrived)]
    findings += _python(host, facts, expected)
    findings += _packages(host, facts, expected)
    findings += _mpi(host, facts, expected)
    findings += _files(host, facts, expected)
    findings += _resources(host, facts, ranks)
    findings += _shared_memory(host, facts, expected, ranks)
    findings.append(_temporary(host, facts.temporary, expected))
    findings += _clock(host, facts)
    findings += _names(host, facts, expected)
    return findings


def _python(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    there, here = (f"Python {f.python} for {f.machine}" for f in (facts, expected.here))
    minor = [f.python.split(".")[:2] for f in (facts, expected.here)]
    if minor[0] != minor[1] or facts.machine != expected.here.machine:
        yield Finding(
            host,
            "Python",
            f"{expected.python} is {there}, here {here}",
            f"install the same Python on {host}, and this environment with it",
            HostSetupError,
        )
    elif facts.python != expected.here.python:
        yield Finding(
            host, "Python", f"{there}, here {here}", f"update the older one, here or on {host}"
        )
    else:
        yield Finding(host, "Python", there)


def _packages(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    same = []
    for name in PACKAGES:
        here, there = expected.here.packages.get(name), facts.packages.get(name)
        if here == there:
            same += [f"{name} {here}"] if here else []
            continue
        remedy = f"on {host}: {expected.python} -m pip install {name}=={here}"
        if not here:
            remedy = (
                f"on {host}: {expected.python} -m pip uninstall {name}; it is not installed here"
            )
        elif name == OURS:
            remedy = _SAME_FILES.format(host=host)
        text = f"{name} is {there}, here {here}" if there else f"{name} is missing, here {here}"
        if there and not here:
            text = f"{name} is {there}, here it is not installed"
        failure = HostSetupError if name in SAME_EVERYWHERE else None
        yield Finding(host, name, text, remedy, failure)
    if same:
        yield Finding(host, "packages", ", ".join(same))
    yield from _files_of_packages(host, facts, expected)


def _files_of_packages(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    for name, folder in facts.missing_links.items():
        text = f"{name} was installed there with `pip install -e {folder}`, and {folder} is missing"
        remedy = f"share {folder}, or copy it to {host}; or install {name} there without -e"
        yield Finding(host, name, text, remedy, HostSetupError if name == OURS else None)
    if OURS in facts.missing_links or facts.packages.get(OURS) != expected.here.packages.get(OURS):
        return
    differ = [n for n, found in expected.here.sources.items() if facts.sources.get(n) != found]
    if differ:
        text = f"the files of {' and '.join(differ)} differ from those here"
        yield Finding(host, OURS, text, _SAME_FILES.format(host=host), HostSetupError)


def _mpi(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    remedy = f"install {expected.mpi} on {host} in the same place"
    if facts.mpirun_missing:
        text = f"{expected.mpirun}: {facts.mpirun_missing}"
        yield Finding(host, "MPI", text, remedy, HostSetupError)
    elif facts.mpirun is not None:
        found = recognise(facts.mpirun, expected.mpirun)
        there = f"{NAMES[found.kind]} {found.version}" if found else "no MPI that hvdrun knows"
        if there != expected.mpi:
            text = f"{expected.mpirun} is {there}, here {expected.mpi}"
            yield Finding(host, "MPI", text, remedy, HostSetupError)
        else:
            yield Finding(host, "MPI", there)


def _files(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    share = f"share the folder (NFS), or copy it to the same place on {host}"
    if facts is expected.here:
        share = "correct the name, or start hvdrun in the folder that has it"
    if facts.cwd:
        text = f"{expected.cwd}: {facts.cwd}"
        remedy = f"{share}; or start hvdrun in a folder that every host has"
        yield Finding(host, "directory", text, remedy, HostSetupError)
        return  # relative paths can't exist either
    yield Finding(host, "directory", expected.cwd)
    if facts.program:
        text = f"{expected.program!r}: {facts.program}"
        remedy = f"correct the name, or install it on {host}"
        yield Finding(host, "program", text, remedy, CommandNotFound)
    elif facts.script:
        text = f"{os.path.join(expected.cwd, expected.script or '')!r}: {facts.script}"
        yield Finding(host, "program", text, share, CommandNotFound)
    else:
        yield Finding(host, "program", " ".join(filter(None, (expected.program, expected.script))))


def _resources(host: str, facts: HostFacts, ranks: int) -> Iterator[Finding]:
    gpus = {0: "no GPU", 1: "1 GPU"}.get(facts.gpus, f"{facts.gpus} GPUs")
    cores = "1 core" if facts.cores == 1 else f"{facts.cores} cores"
    yield Finding(host, "cores, GPUs", f"{cores}, {gpus}")
    wanted = ranks * MEMORY_PER_RANK_BYTES
    if facts.memory_bytes is not None:
        if facts.memory_bytes < wanted:
            who = "1 rank" if ranks == 1 else f"{ranks} ranks"
            text = f"only {size(facts.memory_bytes)} are free for {who}"
            yield Finding(
                host, "memory", text, f"end other programs on {host}, or give it fewer slots"
            )
        else:
            yield Finding(host, "memory", f"{size(facts.memory_bytes)} are free")


def _shared_memory(
    host: str, facts: HostFacts, expected: Expected, ranks: int
) -> Iterator[Finding]:
    what = "shared memory"
    found = fit(expected.mpi_kind, ranks, facts.shm, host, expected.variables)
    if found.problem:
        yield Finding(host, what, found.problem, found.remedy, HostSetupError)
        return
    text = found.text or f"{size(facts.shm.free_bytes)} are free in /dev/shm"
    if facts.shm.leftovers and not found.remedy:
        text += f"; {leftovers(facts.shm, host)}"
    yield Finding(host, what, text, found.remedy)


def _clock(host: str, facts: HostFacts) -> Iterator[Finding]:
    if abs(facts.clock_skew_s) > CLOCK_SKEW_S:
        way = "ahead" if facts.clock_skew_s > 0 else "behind"
        text = f"its clock is {abs(facts.clock_skew_s):.0f} s {way}"
        remedy = f"set it by NTP on {host} and here (timedatectl set-ntp true)"
        yield Finding(host, "clock", text, remedy)
    else:
        yield Finding(host, "clock", "as here")


def _temporary(host: str, found: Temporary, expected: Expected) -> Finding:
    """Open MPI's daemons make a folder there, and end without one. MPICH does without."""
    what, needs_it = "temporary files", expected.needs_temporary
    failure = HostSetupError if needs_it else None
    other = f"or set TMPDIR on {host} to a folder on a local disk where you may write"
    remedy = f"remove old files from {found.path} on {host}, {other}"
    if found.problem:
        text = f"nothing can be written to {found.path}: {found.problem}"
        return Finding(host, what, text, f"make room there, or make it writable, {other}", failure)
    free_bytes, free_files = found.free_bytes, found.free_files
    if free_files is not None and free_files < TEMPORARY_FILES:
        text = f"{found.path} has room for only {free_files} more files (inodes)"
        return Finding(host, what, text, remedy, failure)
    if free_bytes is None:
        return Finding(host, what, found.path)
    if free_bytes < SPARE_TEMPORARY_BYTES:
        text = f"only {size(free_bytes)} are free in {found.path}"
        return Finding(host, what, text, remedy, failure if free_bytes < TEMPORARY_BYTES else None)
    return Finding(host, what, f"{size(free_bytes)} are free in {found.path}")


def _names(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    good = []
    for name, owned in expected.names.items():
        addresses = facts.resolved.get(name, ())
        own = not owned.isdisjoint(i.address for i in facts.interfaces)
        remedy = f"add {name} with its right address to DNS, or to /etc/hosts on {host}"
        if not addresses:
            failure = HostSetupError if name in expected.needed_names else None
            yield Finding(host, "names", f"{name} is unknown there", remedy, failure)
        elif own or not owned or owned & set(addresses):
            good.append(f"{name} = {addresses[0]}")
        else:
            loop = all(ip_address(a.partition("%")[0]).is_loopback for a in addresses)
            which = f"which is {host} itself" if loop else "which is none of its addresses"
            yield Finding(host, "names", f"{name} is {addresses[0]} there, {which}", remedy)
    if good:
        yield Finding(host, "names", ", ".join(good))


def of_networks(choice: Choice, hosts: Iterable[str]) -> Iterator[Finding]:
    for host in hosts:
        if host in choice.without:
            yield Finding(
                host,
                "network",
                "it has no interface that --network-interfaces names",
                "give a name or a subnet that every host has (`ip address` lists them)",
                HostSetupError,
            )
            continue
        used = [n.members[host] for n in choice.networks if host in n.members]
        left = [f"{i.name} {i.address}: {why}" for h, i, why in choice.excluded if h == host]
        text = ", ".join(f"{i.name} {i.address}/{i.prefix}" for i in used) or "none in common"
        yield Finding(host, "network", text + (f" (not {'; '.join(left)})" if left else ""))
