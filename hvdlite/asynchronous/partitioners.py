"""Into how many parts a parameter is cut, so that a large one spreads over several servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol


class Partitioner(Protocol):
    """Decides how a parameter is cut along its first dimension."""

    def num_parts(self, shape: Sequence[int], element_bytes: int) -> int:
        """How many parts a parameter of this shape gets: from 1 to its first dimension."""


def _positive(what: str, number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{what}={number!r}: expected a whole number, at least 1")
    return number


class _Partitioner:
    def num_parts(self, shape: Sequence[int], element_bytes: int) -> int:
        rows = shape[0] if shape else 1
        size_bytes = math.prod(shape) * element_bytes
        return max(1, min(rows, self._wanted(size_bytes, size_bytes // max(1, rows))))

    def _wanted(self, size_bytes: int, row_bytes: int) -> int:
        raise NotImplementedError


class FixedShardsPartitioner(_Partitioner):
    """Cuts each parameter into the same number of parts, or into its rows if it has fewer.

    Example:
        >>> partitioner = hvd.FixedShardsPartitioner(2)
        >>> partitioner.num_parts([1000, 64], element_bytes=4)
        2
    """

    def __init__(self, num_shards: int) -> None:
        """num_shards: The number of parts.

        Raises:
            ValueError: It is not a whole number of at least 1.
        """
        self.num_shards = _positive("num_shards", num_shards)

    def _wanted(self, size_bytes: int, row_bytes: int) -> int:
        return self.num_shards


class MinSizePartitioner(_Partitioner):
    """Cuts a parameter into as many parts as possible, each of at least `min_shard_bytes`, up to
    `max_shards`.

    Example:
        >>> partitioner = hvd.MinSizePartitioner(min_shard_bytes=64 << 10, max_shards=4)
        >>> partitioner.num_parts([1000, 64], element_bytes=4)
        3
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        """min_shard_bytes: The least size of a part. max_shards: The most parts.

        Raises:
            ValueError: One is not a whole number of at least 1.
        """
        self.min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self.max_shards = _positive("max_shards", max_shards)

    def _wanted(self, size_bytes: int, row_bytes: int) -> int:
        if not row_bytes:
            return 1
        rows_of_part = -(-self.min_shard_bytes // row_bytes)
        return min(self.max_shards, size_bytes // row_bytes // rows_of_part)


class MaxSizePartitioner(_Partitioner):
    """Cuts a parameter into as few parts as possible, each of at most `max_shard_bytes` as far as
    its rows allow, up to `max_shards`.

    Example:
        >>> partitioner = hvd.MaxSizePartitioner(max_shard_bytes=64 << 10)
        >>> partitioner.num_parts([1000, 64], element_bytes=4)
        4
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        """max_shard_bytes: The greatest size of a part. max_shards: The most parts; None: any.

        Raises:
            ValueError: One is not a whole number of at least 1.
        """
        self.max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self.max_shards = None if max_shards is None else _positive("max_shards", max_shards)

    def _wanted(self, size_bytes: int, row_bytes: int) -> int:
        if not row_bytes:
            return 1
        rows_of_part = max(1, self.max_shard_bytes // row_bytes)
        parts = -(-(size_bytes // row_bytes) // rows_of_part)
        return parts if self.max_shards is None else min(parts, self.max_shards)
