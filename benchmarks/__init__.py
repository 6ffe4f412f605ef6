"""Compares hvdlite with its peers, all measured in one run: `python -m benchmarks --help`.

A *contender* is one way to do the work, hvdlite among them; a *peer* is any contender but hvdlite.

    plan.py          pure: what is measured, where, how long
    figures.py       pure: medians, bandwidths, ratios
    limits.py        pure: how a figure is held against a target
    targets.py       pure: the targets, and whether a run meets them
    allreduce.py     times the contenders' allreduce, and checks every result
    streams.py       the bound between hosts: plain TCP
    tail.py          how the times of single small allreduces are distributed
    networks.py      the networks that are trained
    training.py      times the contenders' training step, and checks what was trained
    groups.py        process groups of hvdlite and of Gloo, and one that does nothing
    turns.py         what happens between the contenders' turns
    c10d.py          times operations of torch.distributed on them
    wrapped.py       times steps of DDP and FSDP2 on them
    gpu_c10d.py      the same on GPUs, beside NCCL's own backend; a program of its own
    sharded.py       times steps whose update is divided, and ZeRO's and FSDP2's
    weighted.py      times steps with set_weight, and without
    upkeep.py        CPU time of ranks that are idle or wait
    memory.py        the memory that a training step needs; a program of its own
    copies.py        memory of what a host has once; a program of its own
    watching.py      what stall check, black box and checks cost a step; a program of its own
    checkpoints.py   what saving in the background costs a training; a program of its own
    asynchronous.py  training with a server, beside a slow worker; a program of its own
    reaching.py      times how long such training takes to reach a loss
    star.py          the bound of a server's link: plain TCP
    worker.py        what each rank runs: all of these
    rig.py           several hosts on this machine
    starting.py      starts the workers
    counted.py       the program whose instructions are counted
    instructions.py  counts them, with callgrind
    host.py          describes the machine
    merging.py       pure: a run of some parts and an earlier one of more
    tables.py, report.py, plots.py   the results
    __main__.py      the command
    gpu/             make bench-gpu: steps and operations on GPUs
    cost.py          the cost model; asynchronous_cost.py that of asynchronous training
    latency.py       a program of its own: the forms of an allreduce, on any hosts
"""
