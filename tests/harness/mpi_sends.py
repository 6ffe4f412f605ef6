"""MPI's sends as a test wants them: engines send through a function of the test."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from hvdlite.world.bootstrap import mpi

_WORD = ctypes.c_size_t
_ISEND = ctypes.CFUNCTYPE(
    ctypes.c_int, _WORD, ctypes.c_int, _WORD, ctypes.c_int, ctypes.c_int, _WORD, _WORD
)
TAG = 4  # which argument of MPI_Isend
FIRST_DATA_TAG = 4  # HVDL_TAG_DATA

# As long as this process lives: an engine may still call them.
_callbacks: list[object] = []


def send_through(
    patch: pytest.MonkeyPatch, isend: Callable[[Callable[..., int], tuple[int, ...]], int]
) -> None:
    """Engines that are made while `patch` holds call `isend(real, arguments)` in place of
    MPI_Isend, which is `real`, for as long as they live. It returns MPI's error code."""
    whole = mpi.MpiRuntime.wire

    def wire(mpi_runtime: mpi.MpiRuntime, comm: Any) -> dict[str, int]:
        words = whole(mpi_runtime, comm)
        real = _ISEND(words["isend"])
        callback = _ISEND(lambda *arguments: isend(real, arguments))
        _callbacks.append(callback)
        words["isend"] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        return words

    patch.setattr(mpi.MpiRuntime, "wire", wire)
