"""Programs that need a GPU: `make test-gpu PYTHON=...` runs them, and pytest does not.

`run` starts each `check_*` on ranks. `checking` and `training` are what these have in common.
"""
