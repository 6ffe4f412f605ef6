"""Which ranks work together: their placement on hosts, the memory that those of a host share, and
the team and engine of each process set."""
