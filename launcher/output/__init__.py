"""Shows the ranks' output, and copies it into files.

May import plan, agent, machine and the shared modules at the top.
"""
