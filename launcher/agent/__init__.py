"""The processes that hvdrun runs beside each rank and on each remote host.

They run without site-packages and add 15 ms to each rank's start: this folder may import only
itself and machine, and as little of the standard library as possible.
"""
