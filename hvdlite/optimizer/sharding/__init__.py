"""Optimizers of which each rank has a part: of the reduced gradients, of the state, of the update."""
