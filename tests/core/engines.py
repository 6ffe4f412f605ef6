"""Engines of the C core without a world: two ranks of one host, in processes or in one."""

from hvdlite import _core

INLINE_BYTES, BLOCK_BYTES = 4096, 65536


def make_engine(
    rank,
    memory,
    progress_thread=True,
    event_capacity=0,
    stall_shutdown_s=0.0,
    world_ranks=(0, 1),
    black_box=(0, 0),
):
    """memory: a descriptor of `_core.memory_bytes(2, 2, INLINE_BYTES, BLOCK_BYTES)` bytes, which
    both ranks have."""
    return _core.Engine(
        rank=rank,
        hosts=[[0, 1]],
        host_names=["here"],
        world_ranks=list(world_ranks),
        memory_fd=memory,
        wire=None,
        progress_thread=progress_thread,
        inline_bytes=INLINE_BYTES,
        block_bytes=BLOCK_BYTES,
        segment_bytes=61440,
        piece_bytes=1 << 20,
        algorithms=(),
        deterministic=False,
        event_capacity=event_capacity,
        stall_warning_s=0,
        stall_shutdown_s=stall_shutdown_s,
        launcher=(-1, 0, 0),
        black_box=black_box,
    )
