"""Optimizers of which each rank has a part: of the gradients, the state and the update."""
