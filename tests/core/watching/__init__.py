"""hvdlite/_core/watching: what reports say."""
