"""What training scripts write around the optimizer, each time anew: learning rates of large
batches, metrics, checkpoints, samplers, seeds, what only rank 0 does. Imports what `hvdlite` offers
its users."""

from hvdlite.recipes.samplers import DistributedSampler, ElasticDistributedSampler

__all__ = ["DistributedSampler", "ElasticDistributedSampler"]
