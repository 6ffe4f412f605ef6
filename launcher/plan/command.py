"""What is run for a request: pure functions from the request and the facts to an argv."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdrun.agent.keeper import escape
from hvdrun.errors import UsageError
from hvdrun.machine.environment import (
    AGENT,
    EXPORTED,
    LINK,
    PATIENCE,
    PYTHON,
    SRUN,
    SSH,
    forwarded,
    inheritable,
)
from hvdrun.plan import slurm
from hvdrun.plan.flavour import INTEL, MPICH, OPENMPI, Flavour
from hvdrun.plan.host_facts import HostFacts
from hvdrun.plan.hosts import Host, Share, merge, place
from hvdrun.plan.request import Request

# Names that mean another machine on each.
LOOPBACK = ("localhost", "127.0.0.1", "::1")

WITHOUT_FABRIC = (
    "Open MPI's libfabric is left out (^ofi), as this host has no InfiniBand, Omni-Path or"
    " Slingshot: it would look for them for a second"
)

# Never a question, never for ever: a host that is gone is noticed within 10 s.
SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=2",
    # Those of the user's configuration are for sessions of theirs, and may be taken by one.
    "ClearAllForwardings=yes",
)


# Under all names that Open MPI's versions have for them.
OPENMPIS_SCHEDULERS = "slurm,pbs,tm,lsf,gridengine"
# How long a rank waits for hvdrun's connection to its host.
PATIENCE_S = 20


@dataclass(frozen=True)
class LocalFacts:
    """What the command depends on beside the request."""

    environ: Mapping[str, str]
    cwd: str
    python: str  # the interpreter of hvdrun, at the same place on every host
    agent: str  # the path of agent.py, likewise
    hostname: str
    local_names: frozenset[str]  # names and addresses of this host
    cores: int
    gpus: int
    is_root: bool
    has_fabric: bool  # a network that libfabric would serve
    master_port: int
    user: str = ""  # that hvdrun runs as
    path_is_changed: bool = False  # PATH in `environ` is not the caller's
    srun: str = ""  # inside a job of Slurm's
    # By name, what is known of other hosts; the others are taken to be like this one.
    others: Mapping[str, HostFacts] = field(default_factory=dict)
    # Which networks to use: for mpirun, and for the ranks where they have no value yet.
    network_options: tuple[str, ...] = ()
    network_variables: Mapping[str, str] = field(default_factory=dict)

    def has(self, host: Host) -> tuple[int, str]:
        """How many ranks a host runs where nobody says, one for each GPU or core; and of what."""
        other = None if is_local(host, self) else self.others.get(host.name)
        gpus, cores = (self.gpus, self.cores) if other is None else (other.gpus, other.cores)
        if gpus:
            return gpus, "GPU"
        return host.cpus or cores, "core"


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    environment: dict[str, str]  # of mpirun; values that the ranks get never stand in argv
    added: tuple[str, ...]  # names in it that hvdrun made; their values are no secrets
    passed: tuple[str, ...]  # names of those that the ranks get
    shares: tuple[Share, ...]
    # What hvdrun starts for a connection to each host that mpirun has none to.
    connections: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]  # what the user should know
    explanations: tuple[str, ...]  # and what only with --verbose
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
    def starter(self) -> str:
        """What starts the ranks, for messages."""
        return "srun" if os.path.basename(self.argv[0]) == "srun" else "mpirun"

    @property
    def num_proc(self) -> int:
        return sum(share.count for share in self.shares)

    def is_remote(self, facts: LocalFacts) -> bool:
        return any(not is_local(share.host, facts) for share in self.shares)

    def show(self, facts: LocalFacts) -> str:
        """For `--dry-run`: a shell would run exactly this."""
        settings = [f"{name}={shlex.quote(self.environment[name])}" for name in self.added]
        lines = [f"cd {shlex.quote(facts.cwd)}"]
        lines.append("# variables that the ranks get: " + " ".join(self.passed))
        lines += [f"# meanwhile, for signs of life: {shlex.join(c)}" for c in self.connections]
        return "\n".join([*lines, " ".join([*settings, shlex.join(self.argv)])])


def is_local(host: Host, facts: LocalFacts) -> bool:
    return host.name.lower() in facts.local_names and host.user in (None, facts.user)


def mpi_name(host: Host, facts: LocalFacts) -> str:
    """What MPI is told to call a host. All of them divide an IPv6 address at its colons, in
    brackets too; the agent in ssh's place is told which address the name is for."""
    if ":" not in host.name:
        return host.name
    if is_local(host, facts):
        return facts.hostname
    return "ipv6-" + re.sub(r"[^0-9a-z]", "-", host.name.lower())


def hosts_of(request: Request) -> tuple[Host, ...]:
    given = request.hosts or (request.allocation.hosts if request.allocation else ())
    return given or (Host("localhost"),)


def with_hosts_in_use(request: Request, facts: LocalFacts) -> Request:
    """Without hosts that will have no rank, as far as that is known before any is asked: nobody
    need wait for them.

    Raises TooManyProcesses, or UsageError for another user on this machine, whom no MPI heeds.
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
    return request.allocation.remedy if request.allocation and not request.hosts else ""


def is_remote(request: Request, facts: LocalFacts) -> bool:
    return any(not is_local(host, facts) for host in hosts_of(request))


def _place(request: Request, flavour: Flavour, facts: LocalFacts) -> tuple[Share, ...]:
    hosts = hosts_of(request)
    if not flavour.srun:  # which knows hosts by no names but Slurm's
        hosts = _by_machine(hosts, facts)
    return place(hosts, request.num_proc, lambda host: facts.has(host)[0], _remedy(request))


def _by_machine(hosts: Sequence[Host], facts: LocalFacts) -> tuple[Host, ...]:
    """A machine that has several names here is one host, under the first of them: Open MPI's
    daemons would get in each other's way. This one's own names come before those that ssh reaches
    it by."""
    own = [replace(h, user=None, port=None) if is_local(h, facts) else h for h in hosts]
    names: dict[object, str] = {}
    for host in sorted(own, key=lambda host: not is_local(host, facts)):
        names.setdefault(_machine(host, facts), host.name)
    return merge((replace(host, name=names[_machine(host, facts)]), host.name) for host in own)


def _machine(host: Host, facts: LocalFacts) -> object:
    """Equal for names that mean the same machine, by the same user and port."""
    seen = facts.others.get(host.name)
    if seen is None or not seen.interfaces:
        return is_local(host, facts) or host.name
    return seen.hostname, seen.interfaces, host.user, host.port


def build(request: Request, flavour: Flavour, facts: LocalFacts) -> Command:
    shares = _place(request, flavour, facts)
    notes = (*request.notes, *_notes(shares, facts))
    remote = [share for share in shares if not is_local(share.host, facts)]
    if not remote and not flavour.srun:
        # One name for this machine, whatever it was called: nothing goes over ssh.
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
    if flavour.srun:
        # The job's: srun would say that it does not suit the step.
        environment.pop("SLURM_NTASKS_PER_NODE", None)
    exported = []
    for name, value in request.exports.items():
        if value is None and name not in facts.environ:
            raise UsageError(
                f"-x {name}: it is not set here; set it, or give it as -x {name}=VALUE"
            )
        environment[name] = facts.environ[name] if value is None else value
        exported.append(name)
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": shares[0].host.name if remote else "127.0.0.1",
        "MASTER_PORT": str(facts.master_port),
        **facts.network_variables,
    }
    added = {name: value for name, value in defaults.items() if name not in environment}
    added.update(request.settings)
    ranks_get = list({**environment, **added})
    if remote:
        added[EXPORTED] = " ".join(exported)
        added |= _connection_variables(request, facts, remote)
        if has_blanks(facts):
            added |= {PYTHON: facts.python, AGENT: facts.agent}
    if flavour.srun:
        options, more = _slurm(request, flavour, facts, for_mpi)
    elif flavour.kind == OPENMPI:
        options, more = _openmpi(request, flavour, facts, for_mpi, bool(remote))
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
    if flavour.srun:
        argv = [*options, *request.mpi_args, *program]
    elif flavour.kind == OPENMPI:
        named = (*names, EXPORTED, LINK) if remote else ()
        argv = [*options, *(word for name in named for word in ("-x", name))]
        argv += [*request.mpi_args, *program]
    else:
        # All of them, as MPICH 5.0 takes the first of a -genvlist alone. The keepers put those of
        # the host right.
        argv = [*options, "-genvall", *request.mpi_args]
        argv += _intel_program(program, for_mpi) if flavour.kind == INTEL else program
    agent = (facts.python, "-I", "-S", facts.agent, "ssh")
    return Command(
        argv=(flavour.srun or flavour.mpirun, *argv),
        environment=environment,
        added=tuple(added),
        passed=names,
        shares=shares,
        connections=tuple((*agent, s.host.name) for s in remote) if flavour.srun else (),
        notes=notes,
        explanations=(WITHOUT_FABRIC,) if "^ofi" in options else (),
        program=request.command[0],
        python=facts.python,
    )


def _host_list(shares: tuple[Share, ...]) -> str:
    return ",".join(f"{share.host.name}:{share.count}" for share in shares)


def has_blanks(facts: LocalFacts) -> bool:
    return " " in facts.python + facts.agent


def ssh_agent(facts: LocalFacts) -> tuple[str, str]:
    """What stands in ssh's place: a program and its arguments, which MPIs divide at each blank."""
    if not has_blanks(facts):
        return facts.python, f"-I -S {facts.agent} ssh"
    script = f'exec "${PYTHON}" -I -S "${AGENT}" ssh "$@"'.replace(" ", "\t")
    return "/bin/sh", f"-c {script} hvdrun"


def _openmpi(
    request: Request, flavour: Flavour, facts: LocalFacts, shares: tuple[Share, ...], remote: bool
) -> tuple[list[str], dict[str, str]]:
    total = sum(share.count for share in shares)
    options = ["--allow-run-as-root"] if facts.is_root else []
    options += ["-np", str(total), "-H", _host_list(shares)]
    if not {"--map-by", "-map-by", "--rankfile", "-rankfile"} & set(request.binding_args):
        options += ["--map-by", "slot"]
    # The keepers bind the ranks: to all cores of a share, where mpirun would take one for each.
    options += request.binding_args or ("--bind-to", "none")
    given = {name[len("OMPI_MCA_") :] for name in facts.environ if name.startswith("OMPI_MCA_")}
    given |= set(request.mpi_args)
    if not facts.has_fabric:
        # libfabric takes a second to find that there is nothing for it.
        for framework in ("btl", "mtl"):
            if framework not in given:
                options += ["--mca", framework, "^ofi"]
    if request.allocation is not None:
        # The hosts and their slots are those of -H, and not what mpirun finds out itself.
        options += [
            "--prtemca" if flavour.major >= 5 else "--mca",
            "ras",
            f"^{OPENMPIS_SCHEDULERS}",
        ]
    if remote:
        agent = " ".join(ssh_agent(facts))
        options += ["--wdir", facts.cwd]
        kind, plm = ("--prtemca", "plm_ssh") if flavour.major >= 5 else ("--mca", "plm_rsh")
        # Every connection starts here, where hvdrun holds its ends.
        options += [kind, "plm", plm[len("plm_") :], kind, f"{plm}_agent", agent]
        options += [kind, f"{plm}_no_tree_spawn", "1"]
    return options, {}


def _slurm(
    request: Request, flavour: Flavour, facts: LocalFacts, shares: tuple[Share, ...]
) -> tuple[list[str], dict[str, str]]:
    assert request.allocation is not None
    options = slurm.step(
        flavour, request.allocation, shares, facts.environ, facts.cwd, request.binding_args
    )
    return options, {PATIENCE: str(PATIENCE_S)}


def goes_by_srun(request: Request, facts: LocalFacts, hosts: Sequence[Host]) -> bool:
    """Whether these hosts are reached by srun, in an allocation of Slurm's, and not by ssh."""
    ssh_is_set_up = request.ssh_port is not None or request.ssh_identity_file is not None
    return slurm.reaches(hosts, request.allocation, facts.srun, ssh_is_set_up)


def _connection_variables(
    request: Request, facts: LocalFacts, remote: list[Share]
) -> dict[str, str]:
    hosts = [share.host for share in remote]
    if goes_by_srun(request, facts, hosts):
        return {SRUN: shlex.join([facts.srun, *slurm.CONNECTION])}
    # Not ssh's: the agent takes the address, the user and the port of each host out of them. Before
    # -p, as ssh takes the first port that it is told.
    own = [f"={mpi_name(host, facts)}={host.name}" for host in hosts if ":" in host.name]
    own += [f"@{host.name}={host.user}" for host in hosts if host.user is not None]
    own += [f"#{host.name}={host.port}" for host in hosts if host.port is not None]
    return {SSH: shlex.join([*own, *ssh_options(request)])}


def _mpich(
    request: Request, facts: LocalFacts, shares: tuple[Share, ...], remote: bool
) -> tuple[list[str], dict[str, str]]:
    total = sum(share.count for share in shares)
    options = ["-np", str(total), "-rmk", "user", "-hosts", _host_list(shares)]
    options += request.binding_args or ("-bind-to", "none")
    if not remote:
        return [*options, "-launcher", "fork"], {}
    # The launcher `rsh`, as `ssh` would put an -x before the arguments of the interpreter.
    program, arguments = ssh_agent(facts)
    options += ["-launcher", "rsh", "-launcher-exec", program, "-wdir", facts.cwd]
    here = [share.host.name for share in shares if is_local(share.host, facts)]
    if here:
        # The name that the other hosts connect to is the one that the user gave.
        options += ["-localhost", here[0]]
    return options, {"HYDRA_LAUNCHER_EXTRA_ARGS": arguments}


def _intel(request: Request, facts: LocalFacts, remote: bool) -> tuple[list[str], dict[str, str]]:
    # Its Hydra takes no number of ranks per host in a list: each host has a part of its own.
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


def ssh_options(request: Request) -> list[str]:
    options = [word for option in SSH_OPTIONS for word in ("-o", option)]
    if request.ssh_port is not None:
        options += ["-p", str(request.ssh_port)]
    if request.ssh_identity_file is not None:
        options += ["-i", request.ssh_identity_file]
    return options


def _notes(shares: tuple[Share, ...], facts: LocalFacts) -> tuple[str, ...]:
    notes = []
    for share in shares:
        slots, what = facts.has(share.host)
        if share.host.slots is None and share.count > slots:
            notes.append(
                f"{share.count} processes on {share.host.name}, which has {slots} {what}"
                f"{'s' if slots > 1 else ''}: they share {'them' if slots > 1 else 'it'}"
            )
    return tuple(notes)
