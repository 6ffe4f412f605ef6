"""What a timeline shows: `python -m hvdlite.report run.json`.

The figures are pure functions of what is in the file. Nothing here needs a world.
"""
