"""Buffers that a module's forward changes, and which therefore can't be shared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


def changed_by_forward(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """The names of such buffers, each with the reason. Knows the modules of torch."""
    for prefix, module in model.named_modules():
        why, names = _of(module)
        for name in names:
            if getattr(module, name, None) is not None:
                yield f"{prefix}.{name}" if prefix else name, f"{why} does so in training"


def _of(module: torch.nn.Module) -> tuple[str, list[str]]:
    kind = type(module).__name__
    own = [name for name, buffer in module.named_buffers(recurse=False) if buffer is not None]
    if isinstance(module, _NormBase):
        names = ["running_mean", "running_var", "num_batches_tracked"]
        return kind, names if module.track_running_stats else []
    if isinstance(module, _SpectralNorm):
        return "spectral_norm", own
    if _observes(module):
        return kind, own
    hooks = [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]
    return "spectral_norm", [f"{hook.name}_{part}" for hook in hooks for part in ("u", "v")]


def _observes(module: torch.nn.Module) -> bool:
    """Whether it is an observer of torch's quantization, which is not imported for this."""
    return any(
        base.__module__.startswith("torch.ao.quantization")
        and base.__name__ in ("ObserverBase", "FakeQuantizeBase")
        for base in type(module).__mro__
    )
