"""PyTorch's test case with ranks that are forked, so that torch is imported once.

Imported in a session only: PyTorch's module reads the backend and the number of ranks from the
environment when it is imported.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import unittest
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.common_distributed import DistTestCases

TESTS = "torch.testing._internal.distributed.distributed_test"
# The features of a backend that PyTorch's tests ask for, by the sets that they look in.
FEATURES = ("ddp", "subgroup", "plugin")
# Seconds for which ranks wait for each other at the barrier of a test's begin and end. PyTorch's 10
# are too few on a machine that is busy.
BARRIER_S = 60
# Modules that tests import by themselves; imported once here, they cost no rank anything.
IMPORTED_ONCE = (
    "torch._dynamo",
    "torch.distributed.algorithms.join",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def load(backend: str) -> type[unittest.TestCase]:
    """PyTorch's tests as a class. backend: what BACKEND says."""
    for feature in FEATURES:
        DistTestCases.backend_feature[feature].add(backend)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    tests: Any = importlib.import_module(TESTS)
    tests.Barrier.sync.__func__.__defaults__ = (None, BARRIER_S)  # wait_for, timeout
    torch.set_num_threads(1)

    class Forked(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            # Spawned ranks would read it anew: setUp has just made the file's folder.
            tests.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *arguments: Any, **more: Any) -> None:
            """In the rank, which ends with the process that has forked it."""
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            super()._run(*arguments, **more)

        def tearDown(self) -> None:
            super().tearDown()
            for process in self.processes:
                process.join()

    Forked.__name__ = Forked.__qualname__ = "TestDistBackend"
    assert not dist.is_initialized()
    return Forked


def gpus() -> int:
    return torch.cuda.device_count()


def skip_reason(method: Any) -> str | None:
    """Why the test is skipped wherever it runs; None where only its ranks can tell."""
    return method.__unittest_skip_why__ if getattr(method, "__unittest_skip__", False) else None
