"""`hvdrun --monitor`: the job live, below its output on a terminal, else a line now and then.

May import job, reports, output and the shared modules at the top.
"""
