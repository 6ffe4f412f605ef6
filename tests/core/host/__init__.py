"""hvdlite/_core/host: what the ranks of one host do through shared memory."""
