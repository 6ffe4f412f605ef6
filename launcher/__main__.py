"""`python -m hvdrun` is `hvdrun`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
