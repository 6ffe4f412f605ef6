"""launcher/rendezvous: hosts that start hvdrun themselves, and the connections between them."""
