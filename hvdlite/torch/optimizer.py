"""Horovod's `horovod.torch.optimizer`: the optimizer."""

from hvdlite import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
