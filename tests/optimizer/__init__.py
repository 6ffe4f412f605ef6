"""hvdlite.optimizer: n ranks train as one process does, and errors reach all ranks."""
