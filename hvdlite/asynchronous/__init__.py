"""Asynchronous training: parameters on servers, workers that do not wait for each other.

docs/design/asynchronous.md has the vocabulary, the protocol and the invariant. It imports the
engine's point-to-point messages (through a team) and nothing of MPI.
"""
