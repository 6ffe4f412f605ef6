"""The GPUs of the hosts: whether they are alike, and whether NCCL will use their networks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from hvdrun.plan.facts import HostFacts
from hvdrun.plan.hosts import few
from hvdrun.plan.request import Request
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
