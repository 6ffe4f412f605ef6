"""The entry point of hvdrun, as a command and as `python -m hvdrun`.

`main` loads the rest, which may take most of a second; this module handles signals until then.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

NAMES: dict[int, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",
    signal.SIGQUIT: "SIGQUIT",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGUSR2: "SIGUSR2",
    signal.SIGALRM: "SIGALRM",
}
interrupted_by: int | None = None


def end(number: int, *_: object) -> NoReturn:
    """Ends hvdrun at Ctrl-C or a signal like it while no rank runs. Not by an exception, which
    could get lost in an import, or print a traceback. In a container hvdrun may be process number
    1, which a signal without a handler does not end."""
    try:
        os.write(2, f"hvdrun: {NAMES[number]}: no rank has been started\n".encode())
    finally:
        os._exit(128 + number)


def interrupt(number: int, *_: object) -> NoReturn:
    global interrupted_by
    interrupted_by = number
    raise KeyboardInterrupt(number)


def tell(number: int, *_: object) -> None:
    """These signals are for ranks (see job.passing_on), and must not end hvdrun either."""
    os.write(2, f"hvdrun: {NAMES[number]} was not passed on: no rank is running\n".encode())


# A signal that is ignored stays so, as HUP under nohup; a caller may have handlers of its own.
ENDS_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
for number in ENDS_JOB:
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    if signal.getsignal(number) == default:
        signal.signal(number, end)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
    if signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, tell)


LACKS_RESOURCE = 76  # errors.LacksResource, which may be what can't be loaded


def main() -> int:
    try:
        from hvdrun.command_line import cli
    except (MemoryError, OSError, SystemError) as error:  # the last: of an import without memory
        why = getattr(error, "strerror", "") or "no memory is left"
        os.write(2, f"hvdrun: its own modules can't be loaded: {why} (see `ulimit -a`)\n".encode())
        return LACKS_RESOURCE
    try:
        for number in ENDS_JOB:
            if signal.getsignal(number) is end:
                # From now on an exception is needed, for code that must clean up.
                signal.signal(number, interrupt)
        return cli.main()
    except KeyboardInterrupt:  # once ranks run, the supervisor handles it
        end(interrupted_by or signal.SIGINT)
    except OSError:  # of words about it to a terminal that is gone
        if interrupted_by is None:
            raise
        end(interrupted_by)


if __name__ == "__main__":
    sys.exit(main())
