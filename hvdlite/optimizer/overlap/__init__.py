"""Parameters that come while the next forward runs: those that are in flight, and the dicts of
modules through which a read waits for them. It may import the world, the collectives' handles and
what observes waits.
"""
