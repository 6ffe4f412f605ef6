"""hvdlite/_core/operations: posting, waiting, results, records."""
