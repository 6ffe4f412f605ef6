"""hvdlite/_core/engine: all collectives, types and sizes on ranks; disagreement; leaving."""
