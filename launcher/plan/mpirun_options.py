"""The options of each MPI's mpirun for hosts, ranks, binding and ssh, and variables in place of
options. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hvdrun.plan.facts import LocalFacts
from hvdrun.plan.flavour import OPENMPI, Flavour
from hvdrun.plan.hosts import Share
from hvdrun.plan.request import Request
from hvdrun.plan.ssh import ssh_agent

# All names that Open MPI's versions have for them.
OPENMPIS_SCHEDULERS = "slurm,pbs,tm,lsf,gridengine"
WHOLE_NAMES = "keep_fqdn_hostnames"


def with_its_variables(request: Request, kind: str) -> Request:
    """With the variables that --mpi-args gives to the ranks among hvdrun's own (-x), which would
    otherwise take their place where hvdrun brings those to the ranks."""
    given: dict[str, str | None] = {}
    rest: list[str] = []
    words = iter(request.mpi_args)
    for word in words:
        option = word.lstrip("-") if word.startswith("-") else ""
        if kind == OPENMPI and option == "x":
            given.update(_assigned(next(words, "")))
        elif kind != OPENMPI and option in ("genv", "env"):
            name = next(words, "")
            given.update(_assigned(name if "=" in name else f"{name}={next(words, '')}"))
        elif kind != OPENMPI and option in ("genvlist", "envlist"):
            given.update((name, None) for name in next(words, "").split(",") if name)
        else:
            rest.append(word)
    return replace(request, mpi_args=tuple(rest), exports={**request.exports, **given})


def _assigned(word: str) -> Iterator[tuple[str, str | None]]:
    name, equals, value = word.partition("=")
    if name:
        yield name, value if equals else None


def openmpi_options(
    request: Request,
    flavour: Flavour,
    facts: LocalFacts,
    shares: tuple[Share, ...],
    hosts_path: str,
    remote: bool,
    without: tuple[str, ...],
) -> tuple[list[str], dict[str, str]]:
    """hosts_path: of the file with the list of hosts, if it is too long for an option."""
    total = sum(share.count for share in shares)
    options = ["--allow-run-as-root"] if facts.is_root else []
    listed = ("--hostfile", hosts_path) if hosts_path else ("-H", host_list(shares))
    options += ["-np", str(total), *listed]
    if not {"--map-by", "-map-by", "--rankfile", "-rankfile"} & set(request.binding_args):
        options += ["--map-by", "slot"]
    # The keepers bind each rank to all cores of its share; mpirun would bind it to one core.
    options += request.binding_args or ("--bind-to", "none")
    given = {name[len("OMPI_MCA_") :] for name in facts.environ if name.startswith("OMPI_MCA_")}
    given |= set(request.mpi_args)
    # libfabric needs a second to find out that there is no such network.
    no_fabric = () if facts.has_fabric else ("ofi",)
    # On one host TCP would only let strangers connect, unless nothing else is left.
    no_tcp = () if remote or without else ("tcp",)
    for framework, parts in (("btl", (*no_fabric, *without, *no_tcp)), ("mtl", no_fabric)):
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
        # Otherwise hosts that call themselves a.1 and a.2 are one host for Open MPI, and it asks
        # name servers for hvdrun's names of hosts.
        if flavour.major >= 5:
            options += ["--prtemca", f"prte_{WHOLE_NAMES}", "1"]
            options += ["--pmixmca", f"pmix_{WHOLE_NAMES}", "1"]
            options += ["--prtemca", "prte_do_not_resolve", "1"]
        else:
            options += ["--mca", f"orte_{WHOLE_NAMES}", "1"]
            options += ["--mca", "if_base_do_not_resolve", "1"]
    return options, {}


def mpich_options(
    request: Request,
    facts: LocalFacts,
    shares: tuple[Share, ...],
    hosts_path: str,
    here: str,
    remote: bool,
) -> tuple[list[str], dict[str, str]]:
    """here: this machine's name on other hosts, if it is one of the job's."""
    total = sum(share.count for share in shares)
    listed = ("-f", hosts_path) if hosts_path else ("-hosts", host_list(shares))
    options = ["-np", str(total), "-rmk", "user", *listed]
    options += request.binding_args or ("-bind-to", "none")
    if not remote:
        return [*options, "-launcher", "fork"], {}
    # Launcher `rsh`: with `ssh`, Hydra would put -x before the interpreter's arguments.
    program, arguments = ssh_agent(facts)
    options += ["-launcher", "rsh", "-launcher-exec", program, "-wdir", facts.cwd]
    if here:
        # The other hosts connect to this machine by the name that the user gave.
        options += ["-localhost", here]
    return options, {"HYDRA_LAUNCHER_EXTRA_ARGS": arguments}


def intel_options(
    request: Request, facts: LocalFacts, remote: bool
) -> tuple[list[str], dict[str, str]]:
    # Intel's Hydra accepts no ranks per host in a list: each host has its own argument set.
    environment = {} if request.binding_args else {"I_MPI_PIN": "0"}
    if not remote:
        return ["-bootstrap", "fork", *request.binding_args], environment
    program, arguments = ssh_agent(facts)
    environment["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = arguments
    options = ["-bootstrap", "rsh", "-bootstrap-exec", program]
    return [*options, "-gwdir", facts.cwd, *request.binding_args], environment


def intel_program(program: list[str], shares: tuple[Share, ...]) -> list[str]:
    argv: list[str] = []
    for share in shares:
        argv += [":"] if argv else []
        argv += ["-host", share.host.name, "-n", str(share.count), *program]
    return argv


def host_list(shares: tuple[Share, ...]) -> str:
    return ",".join(f"{share.host.name}:{share.count}" for share in shares)


def hosts_text(kind: str, shares: tuple[Share, ...], about: Mapping[str, str]) -> str:
    """The list of hosts as a file for mpirun. `about`: comments on them, by name. MPICH takes
    comments only as lines of their own."""
    slots = "{} slots={}\n" if kind == OPENMPI else "{}:{}\n"
    lines = []
    for share in shares:
        if share.host.name in about:
            lines.append(f"# {about[share.host.name]}\n")
        lines.append(slots.format(share.host.name, share.count))
    return "".join(lines)
