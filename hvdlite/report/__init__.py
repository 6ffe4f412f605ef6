"""A page of HTML from a timeline: `python -m hvdlite.report run.json`.

The figures are pure functions of what is in the file. Nothing here needs a world.
"""
