"""Where hvdrun begins: as a command, and as `python -m hvdrun`.

The rest is loaded within `main`, which takes most of a second: Ctrl-C is answered from here on.
"""

from __future__ import annotations

import os
import sys

# typing costs 10 ms of each start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
else:  # what it wraps, which is there already
    import _signal as signal


def end(*_: object) -> NoReturn:
    """The answer to Ctrl-C while no rank runs. Not an exception, where one could be lost in an
    import, or show where it fell."""
    try:
        os.write(2, b"hvdrun: Ctrl-C: no rank has been started\n")
    finally:
        os._exit(128 + signal.SIGINT)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
    signal.signal(signal.SIGINT, end)


def main() -> int:
    from hvdrun.command_line import cli

    try:
        if signal.getsignal(signal.SIGINT) is end:
            # What runs from now on may have something to clear away.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:  # later ones are the supervisor's
        end()


if __name__ == "__main__":
    sys.exit(main())
