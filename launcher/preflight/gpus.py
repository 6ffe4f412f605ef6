"""The GPUs of the hosts: whether they are alike, whether NCCL will use their networks, and whether
those of each host copy to each other right: on the hosts `agent.gpu_copies` does it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from hvdrun.agent.gpu_copies import BEGIN_S, END_S, PAIR_S, START_S
from hvdrun.errors import HostSetupError
from hvdrun.plan.facts import HostFacts, LocalFacts, is_local
from hvdrun.plan.hosts import few
from hvdrun.plan.job_hosts import hosts_of
from hvdrun.plan.programs import what_runs
from hvdrun.plan.request import Request
from hvdrun.preflight.ask_hosts import Conversation
from hvdrun.preflight.connections import HERE
from hvdrun.preflight.findings import Finding


def differences(
    hosts: Mapping[str, HostFacts], request: Request, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """What keeps the GPUs of several hosts from working together at their best. `environ`:
    hvdrun's own. A warning about several hosts stands in the line of the first one."""
    with_gpus = {name: facts for name, facts in hosts.items() if facts.gpus}
    if len(hosts) < 2 or not with_gpus:
        return
    first = next(iter(hosts))
    kinds: dict[str, list[str]] = {}
    for name, facts in hosts.items():
        kinds.setdefault(_gpus_of(facts), []).append(name)
    if len(kinds) > 1:
        said = ", ".join(f"{few(names)} {kind}" for kind, names in kinds.items())
        remedy = "use hosts that are alike: all ranks wait for the slowest GPU"
        yield Finding(first, "GPUs", f"GPUs differ between hosts: {said}", remedy)
    rdma = [name for name, facts in with_gpus.items() if facts.rdma]
    if len(with_gpus) < 2 or not rdma:
        return
    setting = _sockets(request, environ)
    without = [name for name in with_gpus if name not in rdma]
    device = with_gpus[rdma[0]].rdma[0]
    if setting and not without:
        text = f"{setting} makes NCCL use sockets, and the hosts have RDMA devices ({device})"
        yield Finding(first, "RDMA", text, f"unset {setting} to use them")
    elif without and not setting:
        have = "has" if len(rdma) == 1 else "have"
        lack = "has" if len(without) == 1 else "have"
        text = f"{few(rdma)} {have} RDMA devices ({device}), {few(without)} {lack} none"
        remedy = (
            "give every host its devices (their driver; in a container the files in"
            " /sys/class/infiniband and /dev/infiniband), or set NCCL_IB_DISABLE=1"
        )
        yield Finding(first, "RDMA", text, remedy)


def _gpus_of(facts: HostFacts) -> str:
    """As in 8 x H100 80GB HBM3 (driver 580.159)."""
    if not facts.gpus:
        return "no GPU"
    models = Counter(facts.gpu_models)
    if len(models) < 2:  # CUDA_VISIBLE_DEVICES may hide some
        models = Counter({next(iter(models), "GPU"): facts.gpus})
    named = (f"{n} x {model.removeprefix('NVIDIA ')}" for model, n in models.items())
    return " and ".join(named) + (f" (driver {facts.gpu_driver})" if facts.gpu_driver else "")


def _sockets(request: Request, environ: Mapping[str, str]) -> str:
    """The ranks' variable that makes NCCL use sockets between hosts; "" if there is none."""
    if is_set("NCCL_IB_DISABLE", request, environ):
        return "NCCL_IB_DISABLE"
    net = request.variable("NCCL_NET", environ) or ""
    return "NCCL_NET" if net.lower() == "socket" else ""


def is_set(name: str, request: Request, environ: Mapping[str, str]) -> bool:
    return (request.variable(name, environ) or "0") != "0"


WHAT = "copies between GPUs"
LIMIT_S = START_S + BEGIN_S + PAIR_S + 2 * END_S
# What the program needs to find torch and to see the GPUs of the ranks.
VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def copies_between_gpus(
    conversation: Conversation,
    hosts: Mapping[str, HostFacts],
    request: Request,
    facts: LocalFacts,
) -> Iterator[Finding]:
    """Lets the GPUs of each host that has several copy to each other, on all hosts at once."""
    if is_set("NCCL_P2P_DISABLE", request, facts.environ):
        return
    keys = {
        host.name: HERE if is_local(host, facts) else host.name
        for host in hosts_of(request)
        if host.name in hosts and hosts[host.name].gpus > 1
    }
    found = {name: request.variable(name, facts.environ) for name in VARIABLES}
    variables = {name: value for name, value in found.items() if value is not None}
    variables["PATH"] = request.variable("PATH", facts.environ) or os.defpath
    # The Python of the ranks, if they run one, has their torch.
    python = request.command[0] if what_runs(request.command) else facts.python
    order = {"copies": {"python": python, "cwd": facts.cwd, "variables": variables}}
    answers = conversation.order(dict.fromkeys(keys.values(), order), LIMIT_S)
    for host, key in keys.items():
        yield judge_copies(host, answers.get(key, {}).get("copies"))


def judge_copies(host: str, answer: Any) -> Finding:
    """`answer`: see `agent.gpu_copies.copies`."""
    try:
        pairs, tried, problem = int(answer["pairs"]), int(answer["tried"]), str(answer["problem"])
        bad = [f"from GPU {int(a)} to GPU {int(b)}: {what}" for a, b, what in answer["bad"]]
    except (KeyError, TypeError, ValueError):
        pairs, tried, problem, bad = 0, 0, "no answer", []
    if bad:
        remedy = (
            "set NCCL_P2P_DISABLE=1 (-x NCCL_P2P_DISABLE=1), or switch the IOMMU and PCIe's ACS off"
            f" on {host}"
        )
        return Finding(host, WHAT, few(bad), remedy, HostSetupError)
    if problem:
        return Finding(host, WHAT, f"not tried: {problem}")
    if not pairs:
        return Finding(host, WHAT, "none of its GPUs reaches another one's memory")
    return Finding(host, WHAT, f"{tried} of {pairs} pairs tried, all bytes arrived")
