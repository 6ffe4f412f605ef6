"""hvdlite/_core/transfers: sends and receives."""
