"""How a job looks from outside: the timeline's file, and waits that are seen.

Nothing here starts an operation.
"""
