"""A line for each check of a program, and the device that the programs use.

A program marks its checks with `check`: functions whose names say what is true, and which raise
where that is not so. It calls `start`, then `run_checks`. DEVICE=cpu plays a program in host
memory, to find its own mistakes.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import unittest
from collections.abc import Callable
from typing import Any

import torch

import hvdlite as hvd

DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"

Check = Callable[[], None]
_checks: list[Check] = []


def check(function: Check) -> Check:
    """Adds it to those that `run_checks` runs."""
    _checks.append(function)
    return function


def start() -> None:
    """Initializes hvdlite. OWN_NCCL_HOSTID=1: NCCL then lets the ranks share a GPU."""
    hvd.init()
    if os.environ.get("OWN_NCCL_HOSTID"):
        os.environ["NCCL_HOSTID"] = str(hvd.rank())


def needs(fact: bool, what: str) -> None:
    """Leaves a check out that can't be made here."""
    if not fact:
        raise unittest.SkipTest(f"needs {what}")


def error_of(call: Callable[[], object], kind: type[Exception] = hvd.HorovodInternalError) -> str:
    """The text of the error that the call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("no error")


def equal_on_all_ranks(tensors: Any) -> bool:
    """Whether these tensors are finite, and have the same bits on every rank. Collective."""
    flat = torch.cat([t.detach().reshape(-1).cpu().double() for t in tensors])
    everyones = hvd.allgather(flat[None])
    return bool(flat.isfinite().all()) and torch.equal(everyones, flat.expand_as(everyones))


def run_checks() -> None:
    """Runs the checks, or those that the command line names, and ends the process: with 1, if any
    has failed on any rank. Collective."""
    wanted = sys.argv[1:]
    chosen = [one for one in _checks if not wanted or one.__name__ in wanted]
    # Ranks compare outcomes by MPI, which works where hvdlite does not.
    everyones: Callable[[Any], list[Any]] = lambda outcome: [outcome]  # noqa: E731
    if hvd.size() > 1:
        from mpi4py import MPI

        everyones = MPI.COMM_WORLD.Dup().allgather
    failed = False
    for one in chosen:
        begin = time.monotonic()
        outcomes = everyones(_outcome(one))
        elapsed_s = time.monotonic() - begin
        words = {word for word, _ in outcomes}
        word = "FAIL" if "FAIL" in words or len(words) > 1 else words.pop()
        failed |= word == "FAIL"
        if hvd.rank() == 0:
            _print(f"{word} {one.__name__} ({elapsed_s:.1f} s)", outcomes)
        if word != "PASS":
            # What it has left behind must not fail the next one.
            hvd.shutdown()
            hvd.init()
    hvd.shutdown()
    sys.exit(failed)


def _outcome(one: Check) -> tuple[str, str]:
    try:
        one()
    except unittest.SkipTest as reason:
        return "SKIP", str(reason)
    except Exception:
        return "FAIL", traceback.format_exc()
    return "PASS", ""


def _print(line: str, outcomes: list[tuple[str, str]]) -> None:
    texts = [text for _, text in outcomes]
    if not any(texts):
        print(line, flush=True)
    elif len(set(texts)) == 1:
        print(f"{line}: {texts[0].strip()}", flush=True)
    else:
        said = [f"rank {rank} {word}: {text.strip()}" for rank, (word, text) in enumerate(outcomes)]
        print("\n".join([line, *said]), flush=True)
