"""What runs beside each rank: the shim that MPI starts, and the keeper, which starts the rank's
command and tells how it goes. Imports as little as possible, as it delays every rank's start."""
