"""The recipes: learning rates, metrics, checkpoints, samplers and the small helpers of scripts."""
