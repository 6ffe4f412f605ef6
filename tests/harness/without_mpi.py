"""Jobs of plain processes, as torchrun or any other program starts them for torch.distributed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from torch._C._distributed_c10d import TCPStore

from tests.harness.programs import Finished

LIMIT_S = 120
FROM_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def job_without_mpi() -> Iterator[dict[str, str]]:
    """The variables of a job whose Store is in this process, as torchrun's agent has it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    del store


def run_ranks(
    code: str, size: int, variables: Mapping[str, str], *arguments: object
) -> list[Finished]:
    """Plain processes with a RANK each."""
    environ = {name: value for name, value in os.environ.items() if name not in FROM_TORCH}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={
                **environ,
                "OMP_NUM_THREADS": "1",
                **variables,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ends = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        Finished(process.returncode, *end) for process, end in zip(processes, ends, strict=True)
    ]
