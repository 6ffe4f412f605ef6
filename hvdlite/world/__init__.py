"""The world: its ranks and their placement on hosts, MPI, process sets and the engine of each, the
settings, and this rank's GPU and threads. It imports only the C core, the modules that import
nothing else of hvdlite (`errors`, `ops` …), and what the launcher offers.
"""
