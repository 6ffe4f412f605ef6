"""How a job looks from outside: the timeline's file, waits, the summary.

Nothing here starts an operation.
"""
