"""The passes over memory that an allreduce through memory shared by a host needs, and nothing else:
each rank copies its input, adds up its part of all inputs, and copies the sums of the other parts,
with the core's own kernels. No rank waits for another one, and each reads the others' data from its
own cache.

Like `copy` it is a bound, and a tighter one, as it includes the additions.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hvdlite import _core

CHUNK_BYTES = 256 * 1024  # a block of the core: all stays in the cache
LEAST_BYTES = 64 * 1024  # a smaller tensor's time is that of Python's calls
DTYPES = {
    torch.float32: _core.FLOAT32,
    torch.float16: _core.FLOAT16,
    torch.bfloat16: _core.BFLOAT16,
}


def bind(buffer: Tensor, ranks: int) -> Callable[[], None]:
    """Returns a function that makes the passes of one of `ranks` ranks: sums of the buffer's
    own parts."""
    elems = min(buffer.numel(), CHUNK_BYTES // buffer.element_size())
    staging = torch.zeros(elems, dtype=buffer.dtype)
    steps = [step for chunk in buffer.split(elems) for step in _steps(chunk, staging, ranks)]

    def run() -> None:
        for step in steps:
            step()

    return run


def _steps(chunk: Tensor, staging: Tensor, ranks: int) -> list[Callable[[], object]]:
    if ranks == 2:  # everyone adds up everything
        return [
            partial(staging[: chunk.numel()].copy_, chunk),
            _add(chunk, [chunk, staging[: chunk.numel()]]),
        ]
    part = chunk.numel() // ranks
    own, others = chunk[:part], chunk[part:]
    shared = staging[: others.numel()]
    return [
        partial(shared.copy_, others),
        _add(own, [own, *(shared[i * part :][:part] for i in range(ranks - 1))]),
        partial(others.copy_, shared),
    ]


def _add(output: Tensor, inputs: list[Tensor]) -> Callable[[], object]:
    return partial(
        _core.reduce,
        _core.kernel_variants()[0],
        DTYPES[output.dtype],
        _core.SUM,
        output.data_ptr(),
        tuple(tensor.data_ptr() for tensor in inputs),
        output.numel(),
        1.0,
        1,
        1.0,
    )
