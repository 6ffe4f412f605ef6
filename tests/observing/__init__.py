"""What hvdlite reports while it runs: the stall check's warnings and the timeline."""
