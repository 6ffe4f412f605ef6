"""From the request and the facts to the command that runs. Pure functions."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdrun.agent.shim import escape
from hvdrun.errors import UsageError
from hvdrun.machine.environment import (
    AGENT,
    EXPORTED,
    LINK,
    PATIENCE,
    PLACE,
    PYTHON,
    REACH,
    SSH,
    forwarded,
    inheritable,
)
from hvdrun.plan import shared_memory
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.plan.host_facts import HostFacts, SharedMemory
from hvdrun.plan.hosts import Host, Share, merge, place
from hvdrun.plan.request import Request
from hvdrun.plan.schedulers import remedy
from hvdrun.plan.schedulers.scheduler import Starter

# Each machine's names for itself.
LOOPBACK = ("localhost", "127.0.0.1", "::1")

WITHOUT_FABRIC = (
    "Open MPI runs without libfabric (^ofi), as this host has no InfiniBand, Omni-Path or"
    " Slingshot: libfabric would take a second to look for them"
)

# How long ssh may take to connect; during a job, at least as long as a host may be silent.
CONNECT_S = 10
# ssh ends a connection after more than so many of its own signs of life without an answer.
UNANSWERED = 2

# UCX gives up an idle connection that is cut for some seconds, and MPICH then crashes. It is hvdrun
# that notices a host that is gone.
UCX_SURVIVES_CUTS = {"UCX_TCP_KEEPIDLE": "inf"}


# All names that Open MPI's versions have for them.
OPENMPIS_SCHEDULERS = "slurm,pbs,tm,lsf,gridengine"
# How long a rank waits for hvdrun's connection to its host.
PATIENCE_S = 20


@dataclass(frozen=True)
class LocalFacts:
    """What the command depends on besides the request: mostly, this machine."""

    environ: Mapping[str, str]
    cwd: str
    python: str  # hvdrun's interpreter, at the same place on every host
    agent: str  # the path of agent.py, the same on every host
    hostname: str
    local_names: frozenset[str]  # names and addresses of this host
    cores: int
    gpus: int
    is_root: bool
    has_fabric: bool  # a network that libfabric supports
    master_port: int
    user: str = ""  # the account that hvdrun runs under
    path_is_changed: bool = False  # PATH in `environ` is not the caller's
    starter: Starter | None = None  # inside a job of its scheduler
    # Other hosts by name; hosts that are not listed are assumed to be like this one.
    others: Mapping[str, HostFacts] = field(default_factory=dict)
    # The choice of networks: options of mpirun, and variables of the ranks that are not set yet.
    network_options: tuple[str, ...] = ()
    network_variables: Mapping[str, str] = field(default_factory=dict)
    shm: SharedMemory | None = None  # None: unknown

    def default_slots(self, host: Host) -> tuple[int, str]:
        """How many ranks a host runs without a given number, and the unit: one per GPU or core."""
        other = None if is_local(host, self) else self.others.get(host.name)
        gpus, cores = (self.gpus, self.cores) if other is None else (other.gpus, other.cores)
        if gpus:
            return gpus, "GPU"
        return host.cpus or cores, "core"


@dataclass(frozen=True)
class Command:
    starter: str  # what starts the ranks, for messages
    argv: tuple[str, ...]
    environment: dict[str, str]  # of mpirun; argv holds no values of the ranks' variables
    added: tuple[str, ...]  # names in it that hvdrun set; their values are not secret
    passed: tuple[str, ...]  # the names that the ranks get
    shares: tuple[Share, ...]
    # A command per host that mpirun does not connect to: hvdrun's connection to it.
    connections: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]  # what the user should know
    explanations: tuple[str, ...]  # and what is shown only with --verbose
    program: str  # the user's, for messages
    python: str

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
        lines.append("# variables that the ranks get: " + " ".join(self.passed))
        lines += [f"# meanwhile, for signs of life: {shlex.join(c)}" for c in self.connections]
        return "\n".join([*lines, " ".join([*settings, shlex.join(self.argv)])])


def is_local(host: Host, facts: LocalFacts) -> bool:
    return host.name.lower() in facts.local_names and host.user in (None, facts.user)


def mpi_name(host: Host, facts: LocalFacts) -> str:
    """The name of a host for MPI. All MPIs split an IPv6 address at its colons, even in brackets;
    the agent in ssh's place gets the address that the name stands for."""
    if ":" not in host.name:
        return host.name
    if is_local(host, facts):
        return facts.hostname
    return "ipv6-" + re.sub(r"[^0-9a-z]", "-", host.name.lower())


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


def _remedy(request: Request) -> str:
    return remedy(request.allocation) if request.allocation and not request.hosts else ""


def is_remote(request: Request, facts: LocalFacts) -> bool:
    return any(not is_local(host, facts) for host in hosts_of(request))


def _place(request: Request, flavour: Flavour, facts: LocalFacts) -> tuple[Share, ...]:
    hosts = hosts_of(request)
    if flavour.starter is None:  # a starter knows a host only by its scheduler's name
        hosts = _by_machine(hosts, facts)
    return place(
        hosts, request.num_proc, lambda host: facts.default_slots(host)[0], _remedy(request)
    )


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


def _shm_of(host: Host, facts: LocalFacts) -> SharedMemory | None:
    if is_local(host, facts):
        return facts.shm
    return facts.others[host.name].shm if host.name in facts.others else None


def build(request: Request, flavour: Flavour, facts: LocalFacts) -> Command:
    """Raises HostSetupError if the MPI can't work with the /dev/shm of a host."""
    shares = _place(request, flavour, facts)
    shm = shared_memory.settings(
        flavour.kind,
        [(share.host.name, share.count, _shm_of(share.host, facts)) for share in shares],
        shared_memory.variables_of(request, facts.environ),
    )
    notes = (*request.notes, *_notes(shares, facts), *_fixed(request))
    remote = [share for share in shares if not is_local(share.host, facts)]
    starter = flavour.starter
    if not remote:  # else preflight says it
        notes += shm.notes
    if not remote and starter is None:
        # One name for this machine, however it was listed: nothing goes over ssh.
        shares = (Share(Host("localhost"), sum(share.count for share in shares)),)
    elif remote:
        shares = tuple(
            replace(s, host=Host(facts.hostname)) if s.host.name in LOOPBACK else s for s in shares
        )

    for_mpi = tuple(
        replace(share, host=replace(share.host, name=mpi_name(share.host, facts)))
        for share in shares
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
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": shares[0].host.name if remote else "127.0.0.1",
        "MASTER_PORT": str(facts.master_port),
        **facts.network_variables,
    }
    if remote and flavour.kind == MPICH:
        defaults |= UCX_SURVIVES_CUTS
    added = {name: value for name, value in defaults.items() if name not in environment}
    added.update(request.settings)
    added.update(shm.variables)
    if starter and shm.without:  # srun has no options for Open MPI
        added[shared_memory.BTL_VARIABLE] = f"^{','.join(shm.without)}"
    ranks_get = list({**environment, **added})
    if remote:
        added[EXPORTED] = " ".join(exported)
        added |= _connection_variables(request, facts, remote)
        if has_blanks(facts):
            added |= {PYTHON: facts.python, AGENT: facts.agent}
    if starter:
        options, more = _by_scheduler(request, flavour.kind, starter, facts, for_mpi)
    elif flavour.kind == OPENMPI:
        options, more = _openmpi(request, flavour, facts, for_mpi, bool(remote), shm.without)
    elif flavour.kind == MPICH:
        options, more = _mpich(request, facts, for_mpi, bool(remote))
    else:
        options, more = _intel(request, facts, bool(remote))
    options += facts.network_options
    added.update(more)
    if facts.path_is_changed:
        added["PATH"] = environment["PATH"]
    environment.update(added)

    role = "unbound-rank" if request.binding_args else "rank"
    program = [facts.python, "-I", "-S", facts.agent, role, *escape(request.command)]
    names = forwarded(ranks_get, exported)
    if starter:
        argv = [*options, *request.mpi_args, *program]
    elif flavour.kind == OPENMPI:
        named = (*names, EXPORTED, LINK) if remote else ()
        argv = [*options, *(word for name in named for word in ("-x", name))]
        argv += [*request.mpi_args, *program]
    else:
        # All variables, as MPICH 5.0 passes on only the first of a -genvlist. The keepers correct
        # those of the host.
        argv = [*options, "-genvall", *request.mpi_args]
        argv += _intel_program(program, for_mpi) if flavour.kind == INTEL else program
    agent = (facts.python, "-I", "-S", facts.agent, "ssh")
    return Command(
        starter=os.path.basename(starter.program) if starter else "mpirun",
        argv=(starter.program if starter else flavour.mpirun, *argv),
        environment=environment,
        added=tuple(added),
        passed=names,
        shares=shares,
        connections=tuple((*agent, s.host.name) for s in remote) if starter else (),
        notes=notes,
        explanations=(
            *((WITHOUT_FABRIC,) if "^ofi" in options else ()),
            *shm.explanations,
        ),
        program=request.command[0],
        python=facts.python,
    )


def _host_list(shares: tuple[Share, ...]) -> str:
    return ",".join(f"{share.host.name}:{share.count}" for share in shares)


def has_blanks(facts: LocalFacts) -> bool:
    return " " in facts.python + facts.agent


def ssh_agent(facts: LocalFacts) -> tuple[str, str]:
    """The program in ssh's place, and its arguments, which MPIs split at each blank."""
    if not has_blanks(facts):
        return facts.python, f"-I -S {facts.agent} ssh"
    script = f'exec "${PYTHON}" -I -S "${AGENT}" ssh "$@"'.replace(" ", "\t")
    return "/bin/sh", f"-c {script} hvdrun"


def _openmpi(
    request: Request,
    flavour: Flavour,
    facts: LocalFacts,
    shares: tuple[Share, ...],
    remote: bool,
    without: tuple[str, ...],
) -> tuple[list[str], dict[str, str]]:
    total = sum(share.count for share in shares)
    options = ["--allow-run-as-root"] if facts.is_root else []
    options += ["-np", str(total), "-H", _host_list(shares)]
    if not {"--map-by", "-map-by", "--rankfile", "-rankfile"} & set(request.binding_args):
        options += ["--map-by", "slot"]
    # The keepers bind each rank to all cores of its share; mpirun would bind it to one core.
    options += request.binding_args or ("--bind-to", "none")
    given = {name[len("OMPI_MCA_") :] for name in facts.environ if name.startswith("OMPI_MCA_")}
    given |= set(request.mpi_args)
    # libfabric needs a second to find out that there is no such network.
    no_fabric = () if facts.has_fabric else ("ofi",)
    for framework, parts in (("btl", (*no_fabric, *without)), ("mtl", no_fabric)):
        if parts and framework not in given:
            options += ["--mca", framework, f"^{','.join(parts)}"]
    if request.allocation is not None:
        # mpirun must use the hosts and slots of -H, not those that it finds out itself.
        options += [
            "--prtemca" if flavour.major >= 5 else "--mca",
            "ras",
            f"^{OPENMPIS_SCHEDULERS}",
        ]
    if remote:
        agent = " ".join(ssh_agent(facts))
        options += ["--wdir", facts.cwd]
        kind, plm = ("--prtemca", "plm_ssh") if flavour.major >= 5 else ("--mca", "plm_rsh")
        # Every connection starts on this machine, so that hvdrun holds its ends.
        options += [kind, "plm", plm[len("plm_") :], kind, f"{plm}_agent", agent]
        options += [kind, f"{plm}_no_tree_spawn", "1"]
    return options, {}


def _by_scheduler(
    request: Request, kind: str, starter: Starter, facts: LocalFacts, shares: tuple[Share, ...]
) -> tuple[list[str], dict[str, str]]:
    assert request.allocation is not None
    options = starter.rank_options(
        kind, request.allocation, shares, facts.environ, facts.cwd, request.binding_args
    )
    return options, {PATIENCE: str(PATIENCE_S)}


def reached_by(request: Request, facts: LocalFacts, hosts: Sequence[Host]) -> Starter | None:
    """The scheduler's program that reaches these hosts in ssh's place: all of them belong to its
    allocation, and the user has set nothing for ssh. None: ssh reaches them."""
    starter, allocation = facts.starter, request.allocation
    ssh_is_set_up = request.ssh_port is not None or request.ssh_identity_file is not None
    if starter is None or allocation is None or ssh_is_set_up:
        return None
    ours = {host.name for host in allocation.hosts}
    if allocation.scheduler != starter.scheduler or not all(
        host.name in ours and host.user is None and host.port is None for host in hosts
    ):
        return None
    return starter


def _connection_variables(
    request: Request, facts: LocalFacts, remote: list[Share]
) -> dict[str, str]:
    hosts = [share.host for share in remote]
    if starter := reached_by(request, facts, hosts):
        return {REACH: shlex.join(starter.connection("{host}"))}
    # These are not ssh's: the agent reads each host's address, user and port from them. They come
    # before -p, as ssh uses the first port that it gets.
    own = [f"={mpi_name(host, facts)}={host.name}" for host in hosts if ":" in host.name]
    own += [f"@{host.name}={host.user}" for host in hosts if host.user is not None]
    own += [f"#{host.name}={host.port}" for host in hosts if host.port is not None]
    connect_s = max(CONNECT_S, math.ceil(request.host_timeout_s))
    return {SSH: shlex.join([*own, *ssh_options(request, connect_s)])}


def _mpich(
    request: Request, facts: LocalFacts, shares: tuple[Share, ...], remote: bool
) -> tuple[list[str], dict[str, str]]:
    total = sum(share.count for share in shares)
    options = ["-np", str(total), "-rmk", "user", "-hosts", _host_list(shares)]
    options += request.binding_args or ("-bind-to", "none")
    if not remote:
        return [*options, "-launcher", "fork"], {}
    # Launcher `rsh`: with `ssh`, Hydra would put -x before the interpreter's arguments.
    program, arguments = ssh_agent(facts)
    options += ["-launcher", "rsh", "-launcher-exec", program, "-wdir", facts.cwd]
    here = [share.host.name for share in shares if is_local(share.host, facts)]
    if here:
        # The other hosts connect to this machine by the name that the user gave.
        options += ["-localhost", here[0]]
    return options, {"HYDRA_LAUNCHER_EXTRA_ARGS": arguments}


def _intel(request: Request, facts: LocalFacts, remote: bool) -> tuple[list[str], dict[str, str]]:
    # Intel's Hydra accepts no ranks per host in a list: each host has its own argument set.
    environment = {} if request.binding_args else {"I_MPI_PIN": "0"}
    if not remote:
        return ["-bootstrap", "fork", *request.binding_args], environment
    program, arguments = ssh_agent(facts)
    environment["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = arguments
    options = ["-bootstrap", "rsh", "-bootstrap-exec", program]
    return [*options, "-gwdir", facts.cwd, *request.binding_args], environment


def _intel_program(program: list[str], shares: tuple[Share, ...]) -> list[str]:
    argv: list[str] = []
    for share in shares:
        argv += [":"] if argv else []
        argv += ["-host", share.host.name, "-n", str(share.count), *program]
    return argv


def ssh_options(request: Request, connect_s: int = CONNECT_S) -> list[str]:
    """ssh asks nothing and never hangs. It gives up a silent host just after hvdrun would: it is
    there for the time before the host agent runs, and while nobody reads hvdrun's output."""
    every_s = math.ceil((request.host_timeout_s + 1) / (UNANSWERED + 1))
    settings = (
        "BatchMode=yes",
        f"ConnectTimeout={connect_s}",
        f"ServerAliveInterval={every_s}",
        f"ServerAliveCountMax={UNANSWERED}",
        # The user's forwardings are for the user's own sessions, and their ports may be in use.
        "ClearAllForwardings=yes",
        # So are a terminal, which would change the bytes, and a command in place of hvdrun's.
        "RequestTTY=no",
        "RemoteCommand=none",
    )
    options = [word for setting in settings for word in ("-o", setting)]
    if request.ssh_port is not None:
        options += ["-p", str(request.ssh_port)]
    if request.ssh_identity_file is not None:
        options += ["-i", request.ssh_identity_file]
    return options


def _notes(shares: tuple[Share, ...], facts: LocalFacts) -> tuple[str, ...]:
    notes = []
    for share in shares:
        slots, what = facts.default_slots(share.host)
        if share.host.slots is None and share.count > slots:
            notes.append(
                f"{share.count} processes on {share.host.name}, which has {slots} {what}"
                f"{'s' if slots > 1 else ''}: they share {'them' if slots > 1 else 'it'}"
            )
    return tuple(notes)


def _fixed(request: Request) -> tuple[str, ...]:
    return tuple(
        f"-x {name} has no effect: hvdrun sets {name} to what is true of each rank"
        for name in request.exports
        if name in PLACE
    )
