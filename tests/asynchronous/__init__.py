"""Servers and workers: roles, parts, clocks, and training with AsyncOptimizer."""
