"""The program whose instructions are counted: N allreduces through the core, and nothing else.

    python benchmarks/counted.py CORE RANKS KIND BYTES N

The ranks of one host are engines in one process, which take turns: none ever waits, so each run
executes the same instructions. Loads the core (the path of the extension) without torch or MPI.
"""

import array
import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

BOXES: list[Any] = []  # they stay for as long as the process
INLINE_BYTES, BLOCK_BYTES, SEGMENT_BYTES, PIECE_BYTES = 16 << 10, 256 << 10, 60 << 10, 8 << 20


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("hvdlite._core", path)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


def engines(core: Any, ranks: int) -> list[Any]:
    members = list(range(ranks))
    memory_fd = os.memfd_create("counted")
    os.ftruncate(memory_fd, core.memory_bytes(ranks, ranks, INLINE_BYTES, BLOCK_BYTES))
    black_box = array.array("B", bytes(core.BLACK_BOX_BYTES))
    BOXES.append(black_box)
    return [
        core.Engine(
            rank=rank,
            hosts=[members],
            host_names=["this host"],
            world_ranks=members,
            memory_fd=memory_fd if ranks > 1 else -1,
            wire=None,
            progress_thread=False,
            inline_bytes=INLINE_BYTES,
            block_bytes=BLOCK_BYTES,
            segment_bytes=SEGMENT_BYTES,
            piece_bytes=PIECE_BYTES,
            algorithms=(),
            deterministic=False,
            event_capacity=0,
            stall_warning_s=0.0,
            stall_shutdown_s=0.0,
            launcher=(-1, 0, 0),
            black_box=(black_box.buffer_info()[0], 1),
        )
        for rank in members
    ]


def end_all(operations: list[Any]) -> None:
    """Drives each in turn until all have ended."""
    left = operations
    while left:
        left = [operation for operation in left if not operation.poll()]
    for operation in operations:
        failure = operation.wait()
        assert failure is None, failure


def main() -> None:
    path, ranks, kind, size_bytes, count = sys.argv[1], *sys.argv[2:]
    core = load(path)
    everyone = engines(core, int(ranks))
    elements = int(size_bytes) // 4
    buffers = [array.array("f", [1.0]) * elements for _ in everyone]
    places = [buffer.buffer_info()[0] for buffer in buffers]
    each = list(zip(everyone, places, buffers, strict=True))
    if kind == "plan":
        plans = [
            engine.plan("p", core.FLOAT32, core.MAX, place, place, elements, 1.0, 1.0, buffer)
            for engine, place, buffer in each
        ]
    tensors = [SimpleNamespace(shape=(elements,), data_ptr=place.__int__) for place in places]
    for _ in range(int(count)):
        if kind == "plan":
            end_all([plan.start(b) for plan, b in zip(plans, buffers, strict=True)])
        else:
            end_all(
                [
                    engine.post(
                        core.posting(
                            core.ALLREDUCE, "x", False, core.FLOAT32, tensor, tensor, core.MAX
                        ),
                        False,
                    )
                    for engine, tensor in zip(everyone, tensors, strict=True)
                ]
            )
    assert all(buffer[0] == buffer[-1] == 1.0 for buffer in buffers)
    for engine in everyone:
        engine.close()


if __name__ == "__main__":
    main()
