"""The page of `python -m hvdlite.report`."""
