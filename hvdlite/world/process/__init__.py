"""This rank as a process of its host: its GPU, its CPU threads, its signals, and how it ends."""
