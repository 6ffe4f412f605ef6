"""Which GPU a rank uses. How GPU tensors travel is the matter of `hvdlite.gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Visible:
    """The devices that one rank sees: how many, and if it is a single one, which."""

    count: int
    uuid: str = ""


@dataclass(frozen=True)
class Choice:
    """What becomes of a rank: a device to pin, or the reason why none is."""

    device: int | None
    refusal: str = ""


# Why the first GPU tensor is an error; empty: it is none.
refusal = ""


def choose(local: Sequence[Visible], local_rank: int, knob: str) -> Choice:
    """Which device this rank pins, from what all ranks of its host see.

    Raises:
        ValueError: the knob is neither auto, none nor the number of a device.
    """
    if knob == "none":
        return Choice(None)
    own = local[local_rank]
    if knob != "auto":
        if not (knob.isascii() and knob.isdigit() and len(knob) < 10):
            raise ValueError(f"HVDLITE_GPU={knob[:64]!r}: expected auto, none or a device's number")
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
        f"this rank is {local_rank} of {len(local)} on its host and sees {own.count} GPUs, so none "
        "was chosen for it. Start at most one rank per GPU; or let each rank choose: set "
        "HVDLITE_GPU to a device's number (0 on every rank lets them share the first), or to none "
        "to call torch.cuda.set_device yourself",
    )


def visible_devices(knob: str) -> Visible:
    """What this process sees. Counting does not start CUDA; a single device's UUID does."""
    if knob == "none" or not torch.cuda.is_available():
        return Visible(0)
    count = torch.cuda.device_count()
    uuid = ""
    if count == 1 and knob == "auto":
        uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return Visible(count, uuid)


def apply(choice: Choice) -> None:
    """Pins the device, or remembers why there is none."""
    global refusal
    refusal = choice.refusal
    if choice.device is not None:
        torch.cuda.set_device(choice.device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory, of a tensor on a device that lanes do not know (they know
    CUDA's and ROCm's). The device is waited for."""
    return tensor.detach().to("cpu", copy=True).contiguous()
