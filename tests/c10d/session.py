"""One session: all tests, or some, under a name of the backend, with so many ranks.

    python -m tests.c10d.session '{"name": "gloo", "ranks": 3, "jobs": 2, "limit_s": 120, ...}'

Writes a line of JSON for each test to the file `output` of the request. It imports torch once and
forks for each test. Tests wait for each other's ranks most of their time, so that several run at
the same time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.c10d.one_test import SKIPPED, Outcome, Running, as_line

POLL_S = 0.02


@dataclass(frozen=True)
class Request:
    name: str  # of the backend, as the tests see it
    ranks: int
    output: str
    jobs: int = 2  # tests that run at the same time
    limit_s: float = 120.0  # of each test
    only: tuple[str, ...] = ()  # tests; (): all
    needs_gpu: tuple[str, ...] = ()  # tests that are skipped here where there is none


def prepare(request: Request) -> None:
    """What PyTorch's module reads when it is imported."""
    os.environ["BACKEND"] = request.name
    os.environ["WORLD_SIZE"] = str(request.ranks)
    os.environ["INIT_METHOD"] = "file:///replaced-by-setUp"
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def outcomes(request: Request, folder: Path) -> Iterator[Outcome]:
    from tests.c10d.case import gpus, load, skip_reason

    tests = load(request.name)
    names = unittest.TestLoader().getTestCaseNames(tests)
    if missing := set(request.only) - set(names):
        raise ValueError(f"torch has no such test: {', '.join(sorted(missing))}")
    tests.setUpClass()
    gpu = gpus() > 0
    waiting = []
    for name in request.only or names:
        reason = skip_reason(getattr(tests, name))
        if reason is None and not gpu and name in request.needs_gpu:
            reason = "needs a GPU"
        if reason is not None:
            yield Outcome(name, SKIPPED, 0.0, reason)
        else:
            waiting.append(name)
    running: list[Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < request.jobs:
                running.append(Running(tests(waiting.pop(0)), request.limit_s, folder))
            for test in list(running):
                if outcome := test.poll():
                    running.remove(test)
                    yield outcome
            time.sleep(POLL_S)
    finally:
        for test in running:
            test.kill()


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prepare(request)
    with (
        tempfile.TemporaryDirectory(prefix="hvdlite-c10d-") as folder,
        open(request.output, "w", buffering=1) as output,
    ):
        for outcome in outcomes(request, Path(folder)):
            print(as_line(outcome), file=output)


if __name__ == "__main__":
    main()
