"""The exceptions that hvdlite raises.

RuntimeError
 └── HorovodInternalError = HvdliteError    a collective failed, on every rank that takes part
      └── LaunchError                       init(): the processes can't become one world
ValueError                                  a bad argument, at the call
 ├── ConfigError                            an environment variable that can't be parsed
 └── NotInitializedError                    used before init() or after shutdown()
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed on every rank that takes part; the text says who differs, and how."""


HvdliteError = HorovodInternalError


class LaunchError(HorovodInternalError):
    """The processes that were started can't become one world; raised by init() alone."""


class ConfigError(ValueError):
    """A variable of the environment that can't be parsed; the text names it."""


class NotInitializedError(ValueError):
    """There is no world yet, or no longer."""

    def __init__(self) -> None:
        super().__init__("hvdlite is not initialized; call hvdlite.init() first")
