"""Has the GPUs of each host copy to each other: on the hosts `agent.gpu_pairs` does it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from hvdrun.agent.gpu_copies import BEGIN_S
from hvdrun.agent.gpu_pairs import END_S, PAIR_S, START_S
from hvdrun.errors import HostSetupError
from hvdrun.plan.facts import HostFacts, LocalFacts, is_local
from hvdrun.plan.hosts import few
from hvdrun.plan.job_hosts import hosts_of
from hvdrun.plan.programs import what_runs
from hvdrun.plan.request import Request
from hvdrun.preflight.ask_hosts import Conversation
from hvdrun.preflight.connections import HERE
from hvdrun.preflight.findings import Finding
from hvdrun.preflight.gpus import is_set

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
    """`answer`: see `agent.gpu_pairs.copies`."""
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
