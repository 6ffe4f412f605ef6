"""Horovod's `horovod.torch.sync_batch_norm`: batch norm over all ranks."""

from hvdlite import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
