"""hvdlite beside its peers, measured in one run: `python -m benchmarks --help`.

A *contender* is one way to do the work, hvdlite among them; a *peer* is any contender but hvdlite.

    plan.py          pure: what is measured, where, how long
    figures.py       pure: medians, bandwidths, ratios
    targets.py       pure: what is aimed at, and whether it is reached
    allreduce.py     times the contenders' allreduce, and checks every result
    streams.py       the bound between hosts: plain TCP
    tail.py          how the times of single small allreduces are distributed
    networks.py      what is trained
    training.py      times the contenders' training step, and checks what was trained
    upkeep.py        CPU time of ranks that are idle or wait
    memory.py        what a step takes of memory; a program of its own
    worker.py        what each rank runs: all of these
    rig.py           several hosts on this machine
    starting.py      starts the workers
    counted.py       the program whose instructions are counted
    instructions.py  counts them, with callgrind
    host.py          describes the machine
    tables.py, report.py, plots.py   what was found
    __main__.py      the command
    latency.py       a program of its own: the forms of an allreduce, on any hosts
"""
