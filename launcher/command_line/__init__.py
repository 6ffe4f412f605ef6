"""hvdrun's options, its config file and its help page.

May import job, preflight, output, plan and the shared modules at the top; no other folder imports
this one.
"""
