"""Whether a queue's members form a process group, and how: once, at the queue's first number.

Every member says which device it has, and why it can't join a group, if it can't. If all can, and
those that share a device may do so, they connect to a store of member 0, form the group and try it.
They compare the outcome too, so that all do the same: use the group, or stage.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import Store, TCPStore

from hvdlite import _core
from hvdlite.errors import HorovodInternalError
from hvdlite.gpu.backend import Alone
from hvdlite.gpu.devices import Devices
from hvdlite.gpu.process_group import Group
from hvdlite.gpu.row_counts import gather_bytes

if TYPE_CHECKING:
    from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")

# For each address of member 0; some may be unreachable.
CONNECT_LIMIT_S = 3.0
STORE_LIMIT = timedelta(minutes=2)
_NONCE_KEY = "hvdlite"
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Facts:
    """What a member tells the others. rank: its number in the world, for messages."""

    rank: int
    host: str
    # Its device, by the hardware's name; empty: unknown.
    device: str
    # Why it can't join a group; empty: it can.
    problem: str
    # Member 0's store: where it may be reached, and what it has to answer.
    addresses: tuple[str, ...] = ()
    port: int = 0
    nonce: str = ""
    # Its NCCL_HOSTID, by which NCCL tells hosts apart: ranks on different hosts share no device.
    nccl_host: str = ""
    # Whether its NCCL lets several ranks use one device.
    shares: bool = False


def connect(team: Team, devices: Devices, device: torch.device, choice: str) -> Group | None:
    """The group of the team's members, or None where their tensors must be staged.

    Collective over the team; blocks.

    Args:
        device: Which one this member uses.
        choice: Of all members. 'nccl': there must be a group; 'auto': where there can be one.

    Raises:
        HorovodInternalError: A member has left; 'nccl' can't be had. On every member.
    """
    if team.size == 1 and choice != "nccl":
        return Group(Alone(), 0, 1, device)
    own = Facts(
        team.ranks[team.rank],
        socket.gethostname(),
        devices.identity(device),
        devices.problem(),
        nccl_host=os.environ.get("NCCL_HOSTID", ""),
        shares=devices.may_be_shared(),
    )
    store: Store | None = None
    if team.rank == 0 and not own.problem:
        server = TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=STORE_LIMIT, wait_for_workers=False
        )
        nonce = secrets.token_hex(16)
        server.set(_NONCE_KEY, nonce)
        own = dataclasses.replace(
            own, addresses=tuple(own_addresses()), port=server.port, nonce=nonce
        )
        store = server
    name = f"GPU queue of {team.size} ranks"
    payloads = gather_bytes(team, f"{name}: devices", json.dumps(dataclasses.asdict(own)).encode())
    everyones = [Facts(**json.loads(payload)) for payload in payloads]
    reason = obstacle(everyones)
    group = None
    if not reason:
        failure = ""
        try:
            store = store or client_of(everyones)
            group = Group(
                devices.group(store, team.rank, team.size, device),
                team.rank,
                team.size,
                device,
                store,
            )
            attempt(group, devices)
        except Exception as error:  # the others must hear of every failure
            failure = f"rank {own.rank} on {own.host}: {type(error).__name__}: {error}"
        failures = gather_bytes(team, f"{name}: attempt", failure.encode())
        reason = next((text.decode() for text in failures if text), "")
    if not reason:
        return group
    if group is not None:
        group.end()
    if choice == "nccl":
        raise HorovodInternalError(
            f"HVDLITE_GPU_COLLECTIVES=nccl, but the ranks can't form an NCCL group: {reason}; give "
            "each rank its own GPU or its own NCCL_HOSTID, or set it to auto or staged"
        )
    if team.rank == 0:
        log.warning("collectives of GPU tensors go through host memory: %s", reason)
    return None


def obstacle(everyones: Sequence[Facts]) -> str:
    """Why these members can't form a group; empty: they can."""
    users: dict[tuple[str, str], Facts] = {}
    for facts in everyones:
        if facts.problem:
            return f"rank {facts.rank} on {facts.host}: {facts.problem}"
        if not facts.device and len(everyones) > 1:
            return f"rank {facts.rank} on {facts.host} can't read its GPU's UUID"
        other = users.setdefault((facts.device, facts.nccl_host), facts)
        if other is not facts and not (other.shares and facts.shares):
            same = f" and NCCL_HOSTID={facts.nccl_host}" if facts.nccl_host else ""
            return f"ranks {other.rank} and {facts.rank} on {facts.host} share a GPU{same}"
    return ""


def client_of(everyones: Sequence[Facts]) -> Store:
    """A connection to member 0's store.

    Raises:
        ConnectionError: none of its addresses leads there.
    """
    server = everyones[0]
    one_host = len({facts.host for facts in everyones}) == 1
    addresses = (*(["127.0.0.1"] if one_host else []), *server.addresses)
    tried = []
    for address in addresses:
        try:
            socket.create_connection((address, server.port), CONNECT_LIMIT_S).close()
            # Another host may have the same address: checks the nonce.
            store = TCPStore(address, server.port, is_master=False, timeout=STORE_LIMIT)
            if store.get(_NONCE_KEY).decode() == server.nonce:
                return store
            tried.append(f"{address}: another store")
        except (OSError, RuntimeError) as error:
            tried.append(f"{address}: {error}")
    raise ConnectionError(
        f"rank {server.rank} on {server.host} can't be reached at port {server.port}: "
        + "; ".join(tried)
    )


def attempt(group: Group, devices: Devices) -> None:
    """Sums a one of each member: a broken group fails in its first operation.

    Raises:
        RuntimeError: the sum is wrong; whatever the group raises.
    """
    one = torch.ones(1, device=group.device)
    group.allreduce_(
        one,
        _core.posting(_core.ALLREDUCE, "attempt", False, _core.FLOAT32, one, one, _core.SUM),
    )
    if one.item() != group.size:
        raise RuntimeError(f"the sum of {group.size} ones was {one.item()}")


def own_addresses() -> Iterator[str]:
    """Where this host may be reached from others: its interfaces' addresses, and its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                yield address
    yield socket.gethostname()
