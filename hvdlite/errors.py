"""The exceptions that hvdlite raises.

RuntimeError
 ├── HorovodInternalError = HvdliteError    a collective failed, on every rank that takes part
 │    ├── DifferenceError                   the ranks' parameters or state are no longer the same
 │    ├── NumericsError                     HVDLITE_CHECK_NUMERICS: a gradient is not finite
 │    ├── LaunchError                       init(): the processes can't become one world; run()
 │    └── UnsupportedError                  also a ValueError, see below
 └── RankError                              run(): a rank has failed
ValueError                                  a bad argument, raised at the call
 ├── ConfigError                            an environment variable that can't be parsed
 ├── NotInitializedError                    used before init() or after shutdown()
 └── UnsupportedError                       the operation lacks this reduce op, or takes no scalars
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class HorovodInternalError(RuntimeError):
    """An operation failed on every rank that takes part; the text says which ranks differ, and how.

    Example:
        On two ranks:

        >>> try:
        ...     hvd.allreduce(torch.ones(1 + hvd.rank()), name="loss")
        ... except hvd.HorovodInternalError as error:
        ...     print(error)
        allreduce 'loss': ...
    """


HvdliteError = HorovodInternalError


def folded(function: Function) -> Function:
    """The same function; of a HorovodInternalError the traceback ends in it, as what hvdlite has
    called inside says nothing to a user. At the log level debug it has all frames."""

    @functools.wraps(function)
    def folding(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except HorovodInternalError as error:
            if logging.getLogger("hvdlite").isEnabledFor(logging.DEBUG):
                raise
            raise error.with_traceback(None)  # noqa: B904 (it is the same error)

    return folding  # type: ignore[return-value]


class DifferenceError(HorovodInternalError):
    """`check_parameters`, or HVDLITE_CHECK_PARAMETERS: the ranks' values differ. The same on every
    rank.

    Attributes:
        tensor: The name of the first tensor that differs, as "fc1.weight" or "exp_avg of fc1.bias".
        ranks: Those that differ from the majority in it; empty if there is no majority.
        step: How many steps the optimizer had made; 0: not known.
    """

    def __init__(self, text: str, tensor: str, ranks: tuple[int, ...], step: int) -> None:
        super().__init__(text)
        self.tensor = tensor
        self.ranks = ranks
        self.step = step

    def __reduce__(self) -> tuple[type[DifferenceError], tuple[str, str, tuple[int, ...], int]]:
        return DifferenceError, (str(self), self.tensor, self.ranks, self.step)


class NumericsError(HorovodInternalError):
    """HVDLITE_CHECK_NUMERICS: `step` found NaN or infinite gradients. The text, the same on every
    rank, names the rank, the parameter and the step. No parameter has changed, except by an
    optimizer that had already called its closure, as LBFGS does."""


class LaunchError(HorovodInternalError):
    """`init`: the processes can't become one world. `run`: hvdrun could not start the job."""


class UnsupportedError(HorovodInternalError, ValueError):
    """The operation does not have this reduce op, or does not take scalars.

    Raised at the call. It is a `ValueError`, as for any bad argument, and a `HorovodInternalError`,
    which Horovod raises here.
    """


class ConfigError(ValueError):
    """An environment variable can't be parsed; the text names it."""


class NotInitializedError(ValueError):
    """There is no world: before `init`, or after `shutdown`."""

    def __init__(self) -> None:
        super().__init__("hvdlite is not initialized; call hvdlite.init() first")


class RankError(RuntimeError):
    """A rank of a job that `run` started has failed: the first one.

    Attributes:
        rank: Its number.
        host: Where it ran.
        traceback: The traceback of its exception, as text; or how it ended, if there is none.
    """

    def __init__(self, rank: int, host: str, traceback: str) -> None:
        super().__init__(f"rank {rank} on {host}: {traceback}")
        self.rank = rank
        self.host = host
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[RankError], tuple[int, str, str]]:
        return RankError, (self.rank, self.host, self.traceback)
