"""Chooses and pins the GPU of a rank. `hvdlite.gpu` runs the collectives on GPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Visible:
    """The devices that one rank sees: how many, and the UUID if it sees only one."""

    count: int
    uuid: str = ""


@dataclass(frozen=True)
class Choice:
    """The device that a rank pins, or the reason why it pins none."""

    device: int | None
    refusal: str = ""


# Why a collective on a GPU tensor raises; empty: it does not.
refusal = ""


def choose(local: Sequence[Visible], local_rank: int, knob: str) -> Choice:
    """Which device this rank pins, from what all ranks of its host see.

    Raises:
        ValueError: The knob is a number, and this rank sees no such device.
    """
    if knob == "none":
        return Choice(None)
    own = local[local_rank]
    if knob != "auto":
        if int(knob) >= own.count:
            raise ValueError(f"HVDLITE_GPU={knob}: this process sees {own.count} devices")
        return Choice(int(knob))
    if own.count == 0:
        return Choice(None)
    if all(visible.count >= len(local) for visible in local):
        return Choice(local_rank)
    if all(visible.count == 1 for visible in local):
        uuids = [visible.uuid for visible in local]
        if all(uuids) and len(set(uuids)) == len(uuids):
            return Choice(0)
    return Choice(
        None,
        f"this rank is local rank {local_rank} of {len(local)} and sees {own.count} GPUs, so "
        "hvdlite chose none for it. Start at most one rank per GPU; or choose yourself: set "
        "HVDLITE_GPU to a device's number (0 on every rank makes them share the first), or set it "
        "to none and call torch.cuda.set_device",
    )


def visible_devices(knob: str) -> Visible:
    """The devices that this process sees. Counting does not start CUDA; asking for a UUID does."""
    if knob == "none" or not torch.cuda.is_available():
        return Visible(0)
    count = torch.cuda.device_count()
    uuid = ""
    if count == 1 and knob == "auto":
        uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return Visible(count, uuid)


def apply(choice: Choice) -> None:
    """Pins the device, or remembers why the rank has none."""
    global refusal
    refusal = choice.refusal
    if choice.device is not None:
        torch.cuda.set_device(choice.device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory of a tensor on a device that GPU queues do not support (they
    support CUDA and ROCm). Waits for the device."""
    return tensor.detach().to("cpu", copy=True).contiguous()
