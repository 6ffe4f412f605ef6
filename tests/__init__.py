"""The tests: a folder for each folder of sources, the harness, and what concerns all of them."""
