"""Shows the ranks' output, and copies it into files.

May import plan, machine and the shared modules at the top.
"""
