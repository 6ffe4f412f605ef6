"""hvdrun's options, its config file and its help page.

May import every other folder; no other folder imports this one.
"""
