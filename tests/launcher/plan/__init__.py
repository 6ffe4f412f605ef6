"""launcher/plan: hosts and schedulers, and the mpirun command that follows from them."""
