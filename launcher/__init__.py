"""hvdrun: starts a program on many processes and hosts through MPI, and looks after it."""
