"""Runs a job: starts mpirun, reads what happens into events, and does what `job` decides.

May import job, output, plan, agent and machine.
"""
