"""Decides what to do as a job goes on, and how it went: events in, actions out; no I/O, no clock.

May import reports, output, plan, agent, machine and the shared modules at the top.
"""
