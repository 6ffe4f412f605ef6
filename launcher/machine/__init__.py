"""Reads and changes the state of one machine: cores, memory, network interfaces, processes, files.

May import only itself and the standard library, as little of it as possible: the agents and hvdlite
load it in every rank.
"""
