"""Which hosts belong to a job that is started on each of them, and which of them this is. Pure.

A node is a host that starts hvdrun itself; nodes are numbered from 0, and all connect to node 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdrun.errors import UsageError
from hvdrun.machine.environment import KEEPER

# Where node 0 listens if nobody says it.
PORT = 29717
MOST_NODES = 1 << 16

# Platforms' names for the same, the first one counts. Kubernetes numbers the pods of an Indexed
# Job.
_NODE_RANK_OF_TORCH = ("NODE_RANK", "PET_NODE_RANK")
_NODE_RANK = (*_NODE_RANK_OF_TORCH, "JOB_COMPLETION_INDEX")
_NODES = ("NNODES", "PET_NNODES")
_ADDRESS = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
_ENDPOINT = "PET_RDZV_ENDPOINT"

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"  # of a host, or its IPv4 address
_IPV6 = r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?"
# The tasks of TF_CONFIG in the order of their nodes. `master` is what `chief` was called once.
_TASKS = ("chief", "master", "worker", "ps")
_SERVER = "ps"
_EVALUATOR = "evaluator"


class Place(NamedTuple):
    """This node's place among the nodes of its job."""

    host: str  # of node 0, as the other nodes reach it; without the brackets of an IPv6 address
    port: int
    node_rank: int
    nodes: int
    source: str  # what says so, for messages
    servers: int = 0  # so many of the last nodes are parameter servers, with one process each

    @property
    def meets_at(self) -> str:
        return address(self.host, self.port)


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def by_options(
    rendezvous: str | None, node_rank: int | None, nodes: int | None, environ: Mapping[str, str]
) -> Place | None:
    """From --rendezvous, --node-rank and --nodes. What of the last two is not given comes from the
    platform's variables. None if none of the three is given."""
    if rendezvous is None:
        for option, value in (("--node-rank", node_rank), ("--nodes", nodes)):
            if value is not None:
                raise UsageError(
                    f"{option} {value} needs --rendezvous HOST:PORT: the host whose --node-rank is"
                    " 0, where the others find it; with ssh, name the hosts instead, as in -H"
                    " host1:4,host2:4"
                )
        return None
    host, port = _host_and_port(rendezvous, "--rendezvous", PORT)
    sources = ["--rendezvous"]
    if nodes is None:
        name, text = _first(_NODES, environ)
        if not name:
            raise UsageError(
                f"--rendezvous {rendezvous}: of how many hosts? Give --nodes N, or set"
                f" {_NODES[0]}, the same on all of them"
            )
        nodes = _nodes(name, text)
        sources.append(name)
    if node_rank is None:
        name, text = _first(_NODE_RANK, environ)
        if not name:
            raise UsageError(
                f"--rendezvous {rendezvous}: which of the {nodes} hosts is this? Give --node-rank"
                f" 0 to {nodes - 1}, or set {_NODE_RANK[0]}, another one on each host"
            )
        node_rank = _number(name, text)
        sources.append(name)
    return _checked(Place(host, port, node_rank, nodes, " and ".join(sources)))


def by_variables(environ: Mapping[str, str]) -> Place | None:
    """From what a platform sets for each host of a job. None if there is nothing of it, or the job
    has one host. Not within a rank, which inherits its host's variables.

    Raises UsageError for variables that contradict each other or do not suffice."""
    if KEEPER in environ:
        return None
    found = _tf_config(environ) or _torch(environ) or _sagemaker(environ)
    if found is None:
        _check_alone(environ)
    return found if found is not None and found.nodes > 1 else None


def _tf_config(environ: Mapping[str, str]) -> Place | None:
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"TF_CONFIG is not JSON: {error}; unset it, or correct it") from error
    cluster = config.get("cluster") if isinstance(config, dict) else None
    if not cluster:  # a single machine
        return None
    tasks = _lists("TF_CONFIG: cluster", cluster)
    task = config.get("task")
    if not isinstance(task, dict):
        raise _unlike('"task"', "an object with the type and index of this host", task)
    kind, index = task.get("type"), task.get("index")
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        index = int(index)
    if kind == _EVALUATOR:
        raise UsageError(
            "TF_CONFIG makes this host the evaluator, which takes no part in the training job:"
            " start the program that evaluates there without hvdrun, or leave the evaluator out"
        )
    if kind not in _TASKS:
        raise _unlike("task.type", f"one of {', '.join(_TASKS)}", kind)
    own = tasks.get(kind, [])
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(own):
        raise _unlike("task.index", f"a number below {len(own)}, the hosts of {kind}", index)
    before = sum(len(tasks.get(name, ())) for name in _TASKS[: _TASKS.index(kind)])
    all_hosts = [host for name in _TASKS for host in tasks.get(name, ())]
    servers = len(tasks.get(_SERVER, ()))
    if servers == len(all_hosts):
        raise UsageError("TF_CONFIG has only parameter servers (ps): add a worker")
    host, port = _host_and_port(all_hosts[0], "TF_CONFIG", PORT)
    return _checked(Place(host, port, before + index, len(all_hosts), "TF_CONFIG", servers))


def _torch(environ: Mapping[str, str]) -> Place | None:
    """As torchrun's own variables (PET_*), or as people set them in their manifests and scripts."""
    rank_name, rank = _first(_NODE_RANK, environ)
    nodes_name, nodes = _first(_NODES, environ)
    address_name, host = _first(_ADDRESS, environ)
    port_name, port = _first(_PORT, environ)
    if not nodes_name or _nodes(nodes_name, nodes) == 1:
        return None
    given_port = _port(port_name, port) if port_name else PORT
    if not host and environ.get(_ENDPOINT):
        address_name = _ENDPOINT
        host, given_port = _host_and_port(environ[_ENDPOINT], _ENDPOINT, given_port)
    missing = [
        name for name, value in ((_ADDRESS[0], host), (_NODE_RANK[0], rank_name)) if not value
    ]
    if missing:
        raise UsageError(
            f"{nodes_name}={nodes} says that this job has {nodes} hosts, but"
            f" {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set:"
            f" set {nodes_name}, {_ADDRESS[0]} and"
            f" {_NODE_RANK[0]} on each host, or unset {nodes_name}, or name the hosts by -H"
        )
    source = ", ".join((address_name, rank_name, nodes_name))
    return _checked(
        Place(
            host.strip("[]"),
            given_port,
            _number(rank_name, rank),
            _nodes(nodes_name, nodes),
            source,
        )
    )


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raises UsageError if this is one of several nodes, and nothing says of how many. The number
    of an Indexed Job's pod does not say so: each pod may have a job of its own."""
    name, rank = _first(_NODE_RANK_OF_TORCH, environ)
    if not _first(_NODES, environ)[0] and re.fullmatch(r"[0-9]*[1-9][0-9]*", rank.strip()):
        raise UsageError(
            f"{name}={rank} says that this is one of several hosts, but {_NODES[0]} is not set, so"
            f" each would have a job of its own: set {_NODES[0]} and {_ADDRESS[0]} on each host, or"
            f" unset {name}, or name the hosts by -H"
        )


def _sagemaker(environ: Mapping[str, str]) -> Place | None:
    text, own = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST")
    if not text or not own:
        return None
    try:
        hosts = _lists("SM_HOSTS", {"hosts": json.loads(text)})["hosts"]
    except (ValueError, RecursionError) as error:
        raise UsageError(f"SM_HOSTS is not JSON: {error}; unset it, or correct it") from error
    if own not in hosts:
        raise UsageError(f"SM_CURRENT_HOST={own} is not among SM_HOSTS={text}")
    return _checked(Place(hosts[0], PORT, hosts.index(own), len(hosts), "SM_HOSTS"))


def shares(place: Place, num_proc: int | None, slots: Sequence[int]) -> list[int | None]:
    """How many processes each node gets, node by node, servers included: evenly, except that no
    node gets more than its slots (its GPUs, else its cores) while another one has room. None: one
    per slot, which is not known here. A server has one process.

    Raises UsageError if a node would get none.
    """
    workers = place.nodes - place.servers
    if num_proc is None:
        return [None] * workers + [1] * place.servers
    if num_proc < place.nodes:
        raise UsageError(
            f"-np {num_proc} is the number of all processes, and {place.source} names {place.nodes}"
            f" hosts: give at least one to each, -np {place.nodes} or more"
        )
    left = num_proc - place.servers
    capacity = list(slots[:workers])
    if left > sum(capacity):  # more than there is room for: evenly
        capacity = [left] * workers
    counts = [0] * workers
    while left:
        takers = [i for i in range(workers) if counts[i] < capacity[i]]
        each = max(1, min(left // len(takers), min(capacity[i] - counts[i] for i in takers)))
        for i in takers[:left]:
            counts[i] += each
            left -= each
    return [*counts, *[1] * place.servers]


# ---------------------------------------------------------- parts of the texts


def _first(names: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """The first of the variables that is set, and its value; two empty strings if none is."""
    return next(((name, environ[name]) for name in names if environ.get(name)), ("", ""))


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise UsageError(f"{name}={text}: expected a number from 0; correct or unset it")
    return int(text)


def _port(name: str, text: str) -> int:
    port = _number(name, text)
    if not 0 < port < 65536:
        raise UsageError(f"{name}={text}: expected a port, from 1 to 65535; correct or unset it")
    return port


def _nodes(name: str, text: str) -> int:
    """torchrun allows a range, whose ends must be equal here."""
    low, colon, high = text.strip().partition(":")
    if colon and low != high:
        raise UsageError(
            f"{name}={text}: hvdrun starts a job on a fixed number of hosts; give one number"
        )
    return _number(name, low)


def _host_and_port(text: str, where: str, default: int) -> tuple[str, int]:
    found = re.fullmatch(rf"\[({_IPV6})\](?::([0-9]{{1,5}}))?", text.strip())
    found = found or re.fullmatch(rf"({_NAME})(?::([0-9]{{1,5}}))?", text.strip())
    port = int(found[2]) if found and found[2] else default
    if not found or not 0 < port < 65536:
        raise UsageError(
            f"{where}: {text!r} is not HOST:PORT; write it as in node0:{PORT}, an IPv6 address in"
            " brackets"
        )
    return found[1], port


def _checked(place: Place) -> Place:
    if not re.fullmatch(rf"{_NAME}|{_IPV6}", place.host):
        raise UsageError(
            f"{place.source}: {place.host[:100]!r} is not a host: expected a name or an IP address"
        )
    if not 1 <= place.nodes <= MOST_NODES:
        raise UsageError(f"{place.source}: a job of {place.nodes} hosts; give 1 to {MOST_NODES}")
    if place.node_rank >= place.nodes:
        raise UsageError(
            f"{place.source}: this is node {place.node_rank} of {place.nodes}, but nodes are"
            f" numbered from 0 to {place.nodes - 1}"
        )
    return place


def _lists(where: str, given: Any) -> dict[str, list[str]]:
    if not isinstance(given, dict) or not all(
        isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
        for hosts in given.values()
    ):
        raise UsageError(f"{where}: expected lists of hosts, not {json.dumps(given)[:200]}")
    return given


def _unlike(what: str, expected: str, found: object) -> UsageError:
    return UsageError(f"TF_CONFIG: {what}: expected {expected}, not {json.dumps(found)[:100]}")
