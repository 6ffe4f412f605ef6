"""Random jobs with random faults on the rig of several hosts, for as long as one likes.

    make soak MINUTES=30             a random seed, which is printed
    make soak MINUTES=30 SEED=7      the same jobs again
    make soak SEED=7 JOB=12          one of them

drawing.py   a job, from a seed and its number: shape, settings, one fault or none
rank.py      what each rank does, in `works.py` with an oracle for each result
running.py   starts the job on the rig, does the fault, and waits for the end
leftovers.py what there is on each host, before and after
judging.py   what was said and left, compared with what the fault should lead to. Pure
growth.py    one long job, whose processes may not grow
records.py   the log: one line per job, and the sums

After each job nothing may be left on any host. A job without a fault must say nothing; one with a
fault must name the rank or host that has it, and no other.
"""
