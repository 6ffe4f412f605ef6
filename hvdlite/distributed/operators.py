"""Functional collectives that torch does not pass to groups in Python.

`all_gather_into_tensor_out`, which compiled programs use, asks a group for its backend in C++; in
torch 2.13 a group in Python can have none for CPU tensors. For these, this file gives the operator
an implementation in Python that does the same with any group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

Tensor = torch.Tensor

_NAMESPACE = "_c10d_functional"
_NAME = "all_gather_into_tensor_out"
# Holds the implementation while the process lives.
_library: Any = None


def all_gather_into_tensor_out(
    tensor: Tensor, group_size: int, group_name: str, *, out: Tensor
) -> Tensor:
    """`wait_tensor` waits for it."""
    group: Any = c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    options = c10d.AllgatherOptions()
    options.asyncOp = True
    c10d._register_work(out, group._allgather_base(out, tensor, options))
    return out


def register() -> None:
    """Once per process."""
    global _library
    if _library is None and hasattr(getattr(torch.ops, _NAMESPACE), _NAME):
        _library = torch.library.Library(_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
        _library.impl(_NAME, all_gather_into_tensor_out, "CPU")
