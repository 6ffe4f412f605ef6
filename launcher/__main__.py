"""The entry point of hvdrun, as a command and as `python -m hvdrun`.

`main` loads the rest, which may take most of a second; this module handles Ctrl-C until then.
"""

from __future__ import annotations

import os
import sys

# typing costs 10 ms of each start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
else:  # the module that it wraps, which is loaded already
    import _signal as signal


def end(*_: object) -> NoReturn:
    """Ends hvdrun at Ctrl-C while no rank runs. Not by an exception, which could get lost in an
    import, or print a traceback."""
    try:
        os.write(2, b"hvdrun: Ctrl-C: no rank has been started\n")
    finally:
        os._exit(128 + signal.SIGINT)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nothing to do if it is ignored
    signal.signal(signal.SIGINT, end)


LACKS_RESOURCE = 76  # errors.LacksResource, which may be what can't be loaded


def main() -> int:
    try:
        from hvdrun.command_line import cli
    except (MemoryError, OSError) as error:
        why = getattr(error, "strerror", "") or "no memory is left"
        os.write(2, f"hvdrun: its own modules can't be loaded: {why} (see `ulimit -a`)\n".encode())
        return LACKS_RESOURCE
    try:
        if signal.getsignal(signal.SIGINT) is end:
            # From now on an exception is needed, for code that must clean up.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:  # once ranks run, the supervisor handles it
        end()


if __name__ == "__main__":
    sys.exit(main())
