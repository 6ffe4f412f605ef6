"""hvdrun: starts a program as many processes on many hosts through MPI, and watches them."""
