"""Runs the job: starts it, watches its ranks and hosts, ends it, and reports why it failed.

May import output, plan, agent, machine and the shared modules at the top.
"""
