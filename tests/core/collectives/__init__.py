"""hvdlite/_core/collectives: all collectives, types and sizes, on one host and several."""
