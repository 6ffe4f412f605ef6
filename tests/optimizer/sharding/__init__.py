"""Sharded optimizers: what each rank owns of gradients, state and update."""
