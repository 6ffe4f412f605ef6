"""Tests of sharded optimizers, and of shared parameters."""
