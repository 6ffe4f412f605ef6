"""launcher/machine: what hvdrun finds out about a machine, and its own files there."""
