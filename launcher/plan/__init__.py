"""From the request and the hosts to the command that starts the ranks.

May import agent, machine and the shared modules at the top.
"""
