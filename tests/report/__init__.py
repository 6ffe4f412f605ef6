"""What `python -m hvdlite.report` says of a timeline."""
