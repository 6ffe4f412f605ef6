"""The processes that hvdrun runs on each remote host and beside each rank (`rank`), and how it
speaks with them.

They run without site-packages and add 15 ms to each rank's start: this folder may import only
itself and machine, and as little of the standard library as possible.
"""
