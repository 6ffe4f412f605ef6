"""hvdlite/_core/net: algorithms between hosts, simulated and real; messages that fail."""
