"""hvdlite/_core/courses: all collectives, types and sizes, on ranks of one host and of several."""
