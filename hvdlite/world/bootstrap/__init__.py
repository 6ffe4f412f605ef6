"""How ranks find each other and exchange small objects: over MPI, or a Store and sockets."""
