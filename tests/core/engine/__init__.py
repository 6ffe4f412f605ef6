"""hvdlite/_core/engine: whole engines: many hosts, and memory that lacks or must not grow."""
