"""Checks that all ranks reduce the same gradients of the same backward, from the same start values,
and that nothing else reduces them too. It may import the buckets, the collectives, the world and
the C core.
"""
