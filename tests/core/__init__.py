"""The C core: its collectives against oracles, and its parts in small C programs."""
