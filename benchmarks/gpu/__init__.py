"""Benchmarks on GPUs: `make bench-gpu PYTHON=...`, which installs nothing.

__main__.py      the command: starts the parts on ranks, writes JSON, prints tables
contenders.py    what the ranks' programs have in common: the ranks, process groups, times
steps.py         training steps: plain PyTorch, DDP, DistributedOptimizer; a program of its own
networks.py      the networks that are trained
operations.py    allreduces of hvdlite, Gloo and NCCL; a program of its own
tables.py        pure: the results as text
"""
