"""From the request and the facts to the command that runs. Pure functions."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace

from hvdrun.errors import UsageError
from hvdrun.machine.environment import (
    AGENT,
    EXPORTED,
    LINK,
    PATIENCE,
    PLACE,
    PYTHON,
    forwarded,
    inheritable,
    is_of_the_host,
)
from hvdrun.machine.notes import RESULT_PIPE
from hvdrun.machine.remote_words import BOUND, UNBOUND, VERBOSE, escape
from hvdrun.plan import shared_memory
from hvdrun.plan.facts import LOOPBACK, LocalFacts, SharedMemory, is_local, mpi_name, numbered_name
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.plan.hosts import Host, Share
from hvdrun.plan.job_hosts import check_own_names, check_this_host, notes_on, place_ranks
from hvdrun.plan.mpirun_options import (
    host_list,
    hosts_text,
    intel_options,
    intel_program,
    mpich_options,
    openmpi_options,
    with_its_variables,
)
from hvdrun.plan.request import Request, Starter
from hvdrun.plan.ssh import about_host, connection_variables, has_blanks

WITHOUT_FABRIC = (
    "Open MPI runs without libfabric (^ofi), as this host has no InfiniBand, Omni-Path or"
    " Slingshot: libfabric would take a second to look for them"
)

EMPTY = (
    "the ranks do not get these variables, which are empty, as NCCL may take that for 0: {names};"
    " unset them, or give them values"
)


# UCX gives up an idle connection that is cut for some seconds, and MPICH then crashes. It is hvdrun
# that notices a host that is gone.
UCX_SURVIVES_CUTS = {"UCX_TCP_KEEPIDLE": "inf"}


# On one host: UCX listens for connections of ranks on this machine alone.
UCX_ON_LOOPBACK = {"UCX_NET_DEVICES": "lo"}

# In options that place ranks: --map-by, --rankfile, -hosts, -ppn, -rr …
PLACE_RANKS = ("map", "rank", "host", "node", "ppn", "rr")

# A longer list of hosts goes into a file: MPICH sends each variable to each rank, and the kernel
# takes no word of more than 128 KiB.
MOST_BYTES = 16 << 10

# How long a rank waits for hvdrun's connection to its host.
PATIENCE_S = 20


@dataclass(frozen=True)
class Command:
    starter: str  # what starts the ranks, for messages
    argv: tuple[str, ...]
    environment: dict[str, str]  # of mpirun; argv holds no values of the ranks' variables
    added: tuple[str, ...]  # names in it that hvdrun set; their values are not secret
    passed: tuple[str, ...]  # the names that the ranks get
    # What hvdrun sends to the ranks over its own connections; None: all are here, and inherit it
    sent: dict[str, str] | None
    shares: tuple[Share, ...]
    # A command per host that mpirun does not connect to: hvdrun's connection to it.
    connections: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]  # what the user should know
    explanations: tuple[str, ...]  # and what is shown only with --verbose
    program: str  # the user's, for messages
    python: str
    hosts_file: tuple[str, str] | None = None  # the path and content of a file for mpirun
    # The hosts that are not this machine. None: hvdrun does not decide which rank is on which host.
    far: frozenset[str] | None = None

    def ranks_of(self, host: str) -> range:
        begin = 0
        for share in self.shares:
            if share.host.name == host:
                return range(begin, begin + share.count)
            begin += share.count
        return range(0)

    def host_of(self, rank: int) -> str:
        for share in self.shares:
            if rank < share.count:
                return share.host.name
            rank -= share.count
        raise IndexError(rank)

    @property
    def num_proc(self) -> int:
        return sum(share.count for share in self.shares)

    def is_remote(self, facts: LocalFacts) -> bool:
        return any(not is_local(share.host, facts) for share in self.shares)

    def show(self, facts: LocalFacts) -> str:
        """For `--dry-run`: a shell can run exactly this."""
        settings = [f"{name}={shlex.quote(self.environment[name])}" for name in self.added]
        lines = [f"cd {shlex.quote(facts.cwd)}"]
        if self.hosts_file is not None:
            path, content = self.hosts_file
            lines.append(f"cat >{shlex.quote(path)} <<'END'\n{content}END")
        lines.append(f"# variables that the ranks get: {' '.join(self.passed)}")
        if self.sent is not None:
            lines.append(
                "# hvdrun sends them: run by hand, this command brings them to no other host"
            )
        if given := self._given(facts):
            lines.append(f"# hvdrun sets, to values that are not shown here: {' '.join(given)}")
        lines += [f"# meanwhile, for signs of life: {shlex.join(c)}" for c in self.connections]
        return "\n".join([*lines, " ".join([*settings, shlex.join(self.argv)])])

    def _given(self, facts: LocalFacts) -> list[str]:
        """The variables of -x NAME=VALUE: values may be secrets."""
        ours = (name for name in self.passed if name not in self.added)
        return [name for name in ours if self.environment[name] != facts.environ.get(name)]


def _shm_of(host: Host, facts: LocalFacts) -> SharedMemory | None:
    if is_local(host, facts):
        return facts.shm
    return facts.others[host.name].shm if host.name in facts.others else None


def build(request: Request, flavour: Flavour, facts: LocalFacts) -> Command:
    """Raises HostSetupError if the MPI can't work with the /dev/shm of a host, or can't tell two
    hosts apart."""
    if flavour.starter is None:
        request = with_its_variables(request, flavour.kind)
    shares = place_ranks(request, flavour, facts)
    # A rank file has the user's names.
    by_number = (
        flavour.kind in (OPENMPI, MPICH)
        and flavour.starter is None
        and not any("rankfile" in word for word in (*request.binding_args, *request.mpi_args))
    )
    if flavour.kind == OPENMPI and flavour.starter is None:
        check_own_names([share.host for share in shares], facts)
    shm = shared_memory.settings(
        flavour.kind,
        [(share.host.name, share.count, _shm_of(share.host, facts)) for share in shares],
        shared_memory.variables_of(request, facts.environ),
    )
    notes = (*request.notes, *notes_on(shares, facts), *_fixed(request))
    remote = [share for share in shares if not is_local(share.host, facts)]
    starter = flavour.starter
    if not remote:  # else preflight says it
        notes += shm.notes
    if not remote and starter is None:
        # One name for this machine, however it was listed: nothing goes over ssh.
        shares = (Share(Host("localhost"), sum(share.count for share in shares)),)
    elif remote:
        check_this_host(shares, facts)
        shares = tuple(
            replace(s, host=Host(facts.hostname)) if s.host.name in LOOPBACK else s for s in shares
        )

    mpi_names = [
        numbered_name(flavour.kind, number, share.host, facts)
        if by_number
        else mpi_name(share.host, facts)
        for number, share in enumerate(shares)
    ]
    for_mpi = tuple(
        replace(share, host=replace(share.host, name=name))
        for share, name in zip(shares, mpi_names, strict=True)
    )

    environment = inheritable(facts.environ)
    for name in starter.unwanted if starter else ():
        environment.pop(name, None)
    exported = []
    for name, value in request.exports.items():
        if value is None and name not in facts.environ:
            raise UsageError(
                f"-x {name}: the variable is not set here; set it, or give -x {name}=VALUE"
            )
        environment[name] = facts.environ[name] if value is None else value
        exported.append(name)
    if empty := sorted(n for n, v in environment.items() if n.startswith("NCCL_") and not v):
        environment = {n: v for n, v in environment.items() if n not in empty}
        exported = [name for name in exported if name not in empty]
        notes += (EMPTY.format(names=", ".join(empty)),)
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": shares[0].host.name if remote else "127.0.0.1",
        "MASTER_PORT": str(facts.master_port),
        **facts.network_variables,
    }
    if remote and flavour.kind == MPICH:
        defaults |= UCX_SURVIVES_CUTS
    # (UCX reaches no other process by the loopback device.)
    without_memory = "UCX_TLS" in (*shm.variables, *environment) or bool(shm.without)
    if not remote and flavour.kind in (MPICH, OPENMPI) and not without_memory:
        defaults |= UCX_ON_LOOPBACK
    added = {name: value for name, value in defaults.items() if name not in environment}
    added.update(request.settings)
    added.update(shm.variables)
    if starter and shm.without:  # srun has no options for Open MPI
        added[shared_memory.BTL_VARIABLE] = f"^{','.join(shm.without)}"
    ranks_get = list({**environment, **added})
    hosts_file, hosts_path = None, ""
    if remote:
        added[EXPORTED] = " ".join(exported)
        about = {
            name: about_host(name, share.host)
            for name, share in zip(mpi_names, shares, strict=True)
            if not is_local(share.host, facts)
        }
        known = ",".join(line for line in about.values() if len(set(line.split())) > 1)
        if starter is None and max(len(known), len(host_list(for_mpi))) > MOST_BYTES:
            hosts_file = facts.hosts_path, hosts_text(flavour.kind, for_mpi, about)
            known = hosts_path = facts.hosts_path
        added |= connection_variables(request, facts, [s.host for s in remote], known)
        if has_blanks(facts):
            added |= {PYTHON: facts.python, AGENT: facts.agent}
    if starter:
        options, more = _by_scheduler(request, flavour.kind, starter, facts, for_mpi)
    elif flavour.kind == OPENMPI:
        options, more = openmpi_options(
            request, flavour, facts, for_mpi, hosts_path, bool(remote), shm.without
        )
    elif flavour.kind == MPICH:
        here = next((mpi_name(s.host, facts) for s in shares if is_local(s.host, facts)), "")
        options, more = mpich_options(request, facts, for_mpi, hosts_path, here, bool(remote))
    else:
        options, more = intel_options(request, facts, bool(remote))
    options += facts.network_options
    added.update(more)
    if facts.path_is_changed:
        added["PATH"] = environment["PATH"]
    environment.update(added)

    role = UNBOUND if request.binding_args else VERBOSE if request.verbose else BOUND
    program = [facts.python, "-I", "-S", facts.agent, role, *escape(request.command)]
    names = forwarded(ranks_get, exported)
    if starter:
        argv = [*options, *request.mpi_args, *program]
    elif flavour.kind == OPENMPI:
        # Of these keepers need to know before they have the job's variables.
        needed = (LINK, *([RESULT_PIPE] if RESULT_PIPE in environment else ()))
        argv = [*options, *(word for name in needed if remote for word in ("-x", name))]
        argv += [*request.mpi_args, *program]
    else:
        # All variables that mpirun has, as MPICH 5.0 passes on only the first of a -genvlist. The
        # keepers correct those of the host.
        argv = [*options, "-genvall", *request.mpi_args]
        argv += intel_program(program, for_mpi) if flavour.kind == INTEL else program
    agent = (facts.python, "-I", "-S", facts.agent, "ssh")
    return Command(
        starter=os.path.basename(starter.program) if starter else "mpirun",
        argv=(starter.program if starter else flavour.mpirun, *argv),
        environment=environment,
        added=tuple(added),
        passed=names,
        sent={
            name: environment[name]
            for name in (*ranks_get, EXPORTED)
            if name in (*exported, EXPORTED) or not is_of_the_host(name)
        }
        if remote
        else None,
        shares=shares,
        connections=tuple((*agent, s.host.name) for s in remote) if starter else (),
        notes=notes,
        hosts_file=hosts_file,
        explanations=(*((WITHOUT_FABRIC,) if "^ofi" in options else ()), *shm.explanations),
        program=request.command[0],
        python=facts.python,
        far=None if starter or _places_ranks(request) else frozenset(s.host.name for s in remote),
    )


def _places_ranks(request: Request) -> bool:
    """Whether the user may have told mpirun which rank is on which host."""
    words = (*request.binding_args, *request.mpi_args)
    return any(part in word for word in words for part in PLACE_RANKS)


def _by_scheduler(
    request: Request, kind: str, starter: Starter, facts: LocalFacts, shares: tuple[Share, ...]
) -> tuple[list[str], dict[str, str]]:
    assert request.allocation is not None
    options = starter.rank_options(
        kind, request.allocation, shares, facts.environ, facts.cwd, request.binding_args
    )
    return options, {PATIENCE: str(PATIENCE_S)}


def _fixed(request: Request) -> tuple[str, ...]:
    return tuple(
        f"-x {name} has no effect: hvdrun sets {name} to what is true of each rank"
        for name in request.exports
        if name in PLACE
    )
