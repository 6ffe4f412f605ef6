"""Checks the hosts before a job starts on them.

May import plan, agent, machine and the shared modules at the top.
"""
