"""Buckets: which gradients are reduced together, where they are in memory, and in which order
backward produces them. It may import the collectives, the GPU queue, the world and the C core.
"""
