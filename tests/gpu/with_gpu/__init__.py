"""Tests that need a GPU: `make test-gpu PYTHON=...` runs them, and pytest does not."""
