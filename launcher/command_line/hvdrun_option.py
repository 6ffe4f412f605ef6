"""An option of hvdrun: one row says everything about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click


def whole_numbers(minimum: int, maximum: int | None = None) -> click.IntRange:
    """The type of an option. Its name stands in click's error for a text that is no number."""
    kind = click.IntRange(minimum, maximum)
    kind.name = f"whole number from {minimum}" + ("" if maximum is None else f" to {maximum}")
    return kind


def seconds(minimum: float, maximum: float | None = None, open: bool = False) -> click.FloatRange:
    kind = click.FloatRange(minimum, maximum, min_open=open)
    kind.name = "number of seconds"
    return kind


class HvdrunOption(click.Option):
    """An option with its place in the help, in the Request and in the config file.

    group: the heading of `--help` that it stands under; without one it is not listed.
    field: of the Request; by default the one that has the option's name, if there is one.
    parse: from the option's value to the field's.
    one_dash: a spelling with one dash that Horovod's users type.
    from_list: makes a list of the config file the option's text.
    """

    def __init__(
        self,
        *spellings: str,
        group: str = "",
        field: str = "",
        parse: Callable[[Any], Any] = lambda value: value,
        one_dash: str = "",
        from_list: Callable[[Iterable[str]], str] | None = None,
        in_config_file: bool = True,
        **of_click: Any,
    ) -> None:
        super().__init__(spellings, **of_click)
        self.group = group
        self.field = field or str(self.name)
        self.parse = parse
        self.one_dash = one_dash
        self.from_list = from_list
        self.in_config_file = in_config_file

    @property
    def long_spelling(self) -> str:
        return next(spelling for spelling in self.opts if spelling.startswith("--"))
