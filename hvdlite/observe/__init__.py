"""How a job looks from outside: the timeline's file.

Nothing here starts an operation.
"""
