"""A progress bar on one rank: tqdm where it is installed, plain lines where it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from hvdlite.world import world

T = TypeVar("T")

# How often a bar without tqdm prints a line.
_INTERVAL_S = 10.0


def progress_bar(iterable: Iterable[T] | None = None, *, rank: int = 0, **options: Any) -> Any:
    """`tqdm.tqdm(iterable, **options)` on this rank; on the others the same without output.

    Any rank may call it, alone too; nothing is sent.

    Args:
        iterable: What the bar goes through; None to call `update` by hand.
        rank: The rank that shows it.
        options: Those of tqdm. Without tqdm only `total`, `desc`, `unit`, `initial`, `file` and
            `disable` have an effect: the bar is a line every 10 seconds and at the end, and
            `set_postfix` shows its values there.

    Returns:
        tqdm's bar on `rank`. On the others, and without tqdm, an object that iterates, is a
        context, has a length and has tqdm's methods `update`, `set_postfix`, `set_postfix_str`,
        `set_description`, `set_description_str`, `write`, `refresh`, `clear`, `reset`, `close`.

    Example:
        >>> from hvdlite.recipes import progress_bar
        >>> for number in progress_bar(range(2), disable=True):
        ...     print(number)
        0
        1
    """
    if world.rank() != rank:
        return QuietBar(iterable, **options)
    try:
        from tqdm import tqdm
    except ImportError:
        bar = QuietBar if options.get("disable") else PlainBar
        return bar(iterable, **options)
    return tqdm(iterable, **options)


class QuietBar(Generic[T]):
    """Counts, and shows nothing."""

    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        desc: str | None = None,
        total: float | None = None,
        *,
        initial: float = 0,
        unit: str = "it",
        file: Any = None,
        **_: Any,
    ) -> None:
        if total is None:
            total = getattr(iterable, "__len__", lambda: None)()
        self.iterable, self.total, self.n = iterable, total, initial
        self.desc, self.unit, self.postfix = desc or "", unit, ""
        self._file = file

    def __iter__(self) -> Iterator[T]:
        if self.iterable is None:
            raise TypeError("this progress bar has no iterable; call update() on it")
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("the total of this progress bar is not known")
        return int(self.total)

    def __bool__(self) -> bool:
        return self.total is None or self.total > 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        self.n += n

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        self.desc = desc or ""

    set_description_str = set_description

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **values: Any) -> None:
        shown = {**(ordered_dict or {}), **values}
        self.postfix = ", ".join(f"{key}={_short(value)}" for key, value in shown.items())

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self.postfix = s

    def reset(self, total: float | None = None) -> None:
        self.n = 0
        self.total = self.total if total is None else total

    def write(self, s: str, file: Any = None, end: str = "\n", nolock: bool = False) -> None:
        """Prints nothing: it is for the rank that shows the bar."""

    def refresh(self, *_: Any, **__: Any) -> None:
        """Shows nothing."""

    def clear(self, *_: Any, **__: Any) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Shows nothing."""


class PlainBar(QuietBar[T]):
    """Shows a line now and then, and one at the end. For logs as for terminals."""

    def __init__(
        self, *args: Any, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._clock = clock
        self._begin = self._shown = clock()
        self._said_n: float | None = None

    def update(self, n: float = 1) -> None:
        super().update(n)
        if self._clock() - self._shown >= _INTERVAL_S:
            self.refresh()

    def refresh(self, *_: Any, **__: Any) -> None:
        """Shows a line."""
        now = self._shown = self._clock()
        self._said_n = self.n
        seconds = now - self._begin
        of = f"/{self.total:g} ({self.n / self.total:.0%})" if self.total else ""
        rate = f"{self.n / seconds:.4g}" if seconds > 0 else "?"
        line = f"{self.n:g}{of} {self.unit}, {seconds:.0f} s, {rate} {self.unit}/s"
        self.write(
            ": ".join(filter(None, (self.desc, line))) + (f", {self.postfix}" * bool(self.postfix))
        )

    def write(self, s: str, file: Any = None, end: str = "\n", nolock: bool = False) -> None:
        """Prints it."""
        print(s, end=end, file=file or self._file or sys.stderr, flush=True)

    def close(self) -> None:
        """Shows the last line, if it has not been shown."""
        if self._said_n != self.n:
            self.refresh()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
