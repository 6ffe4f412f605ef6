"""DistributedOptimizer: it reduces the gradients of an optimizer in rounds while backward runs, or
with Adasum combines what its steps change. It may import the buckets, the checks, the collectives,
the world and the C core.
"""
