"""hvdlite beside its peers, measured in one run: `python -m benchmarks --help`.

A *contender* is one way to do the work, hvdlite among them; a *peer* is any contender but hvdlite.

    plan.py          pure: what is measured, how often
    figures.py       pure: medians, bandwidths, ratios
    allreduce.py     times the contenders' allreduce, and checks every result
    training.py      times the contenders' training step, and checks what was trained
    worker.py        what each rank runs
    host.py          describes the machine
    report.py        tables, plot, JSON
    __main__.py      the command
"""
