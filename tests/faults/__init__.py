"""Does hvdrun name the culprit? Faults in a small training loop, each on one rank or one host, run
by `make fault-table`; pytest runs a few of them.

    __main__.py      the command: runs the faults, prints the table
    fault.py         a fault: the script that has it, and what hvdrun must say of it
    waits.py         faults that make the other ranks wait
    ends.py          faults that end a rank
    differences.py   ranks that do not do the same, or whose numbers are wrong
    surroundings.py  faults of a host, its network or its cgroups, which the table's program makes
    one_run.py       runs one fault under one MPI, on one host or on the rig's
    judge.py         pure: whether the culprit was named, and who was blamed wrongly
"""
