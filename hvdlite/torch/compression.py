"""Horovod's `horovod.torch.compression`: the choices of compression."""

from hvdlite import Compression

__all__ = ["Compression"]
