"""What the user reads about a job that waits, lacks something or has failed.

May import output, plan, machine and the shared modules at the top.
"""
