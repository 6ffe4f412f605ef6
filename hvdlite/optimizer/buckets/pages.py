"""Memory of gradients that is given back to the system between two steps."""

from __future__ import annotations

import contextlib
import mmap

import torch


class Pages:
    """Tensors in pages of their own, which can be given back to the system while the tensors stay.

    No other data lies in these pages. The system maps new ones, of zeros, where the tensors are
    written or read next.
    """

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []

    def zeros(self, elems: int, *, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Like `torch.zeros`. Memory of other devices than the CPU can't be given back."""
        if torch.device(device).type != "cpu" or not elems:
            return torch.zeros(elems, dtype=dtype, device=device)
        pages = mmap.mmap(-1, elems * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # All of it is used in every step: huge pages save most of the page faults.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(pages)
        # The tensor keeps `pages`.
        return torch.frombuffer(pages, dtype=dtype, count=elems)

    def give_back(self) -> None:
        """Every tensor of this object has the value zero afterwards, or the former one where the
        program has locked its memory (mlockall).

        By libc's madvise, which MPI libraries watch: they forget what they know of these pages.
        """
        for pages in self._maps:
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_DONTNEED)
