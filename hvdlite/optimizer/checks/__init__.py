"""Checks that all ranks reduce the same gradients of the same backward, from the same start values,
that nothing else reduces them too, and that the parameters stay the same and finite. It may import
the buckets, the collectives, shared memory, the world and the C core.
"""
