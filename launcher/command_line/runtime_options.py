"""The runtime's options: each knob's flag sets its variable for all ranks. hvdrun accepts flags of
horovodrun that have no effect here, and says so; it refuses those of elastic training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from hvdrun.command_line.horovod_options import ELASTIC, WITHOUT_EFFECT
from hvdrun.command_line.hvdrun_option import HvdrunOption, whole_numbers
from hvdrun.knobs import KNOBS, Knob

GROUP = "Runtime"  # the heading in --help
TYPES: dict[str, click.ParamType[Any]] = {
    "int": click.INT,
    "float": click.FLOAT,
    "text": click.STRING,
}


class KnobOption(HvdrunOption):
    """Sets a knob; with switches_off, to the value that switches it off."""

    def __init__(self, knob: Knob, switches_off: bool = False) -> None:
        self.knob = knob
        self.switches_off = switches_off
        flag = knob.off_flag if switches_off else knob.flag
        text = f"{knob.help[0].upper()}{knob.help[1:]}."
        if switches_off:
            opposite = f"The opposite of {knob.flag}."
            text = opposite if knob.flag else f"Do not {knob.help}."
        if knob.kind == "bool":
            super().__init__(flag, group=GROUP, is_flag=True, help=text)
            return
        kind: click.ParamType[Any] = click.STRING
        metavar = "TEXT"
        if knob.choices:
            metavar = "|".join((*knob.choices, "N") if knob.maximum else knob.choices)
        elif knob.kind == "int":
            kind = whole_numbers(-(-knob.minimum // knob.unit), knob.maximum // knob.unit)
            metavar = "MIB" if knob.unit > 1 else "N"
        super().__init__(
            flag, group=GROUP, type=kind, metavar=metavar, help=text, callback=self._checked
        )

    def _checked(self, ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        """The value as it was typed, if the knob accepts it."""
        if isinstance(value, str):
            try:
                self.knob.parse(value)
            except ValueError as error:
                raise click.BadParameter(f"{value!r}: {error}", ctx, param) from None
        return value

    def value_of(self, given: Any) -> str:
        """The variable's value."""
        if self.knob.kind == "bool":
            return "0" if self.switches_off else "1"
        return str(given * self.knob.unit if self.knob.kind == "int" else given)


class IdleOption(click.Option):
    """Does nothing; `why` is the reason."""

    def __init__(self, flag: str, takes: str, why: str) -> None:
        self.why = why
        if takes:
            super().__init__([flag], type=TYPES[takes], hidden=True)
        else:
            super().__init__([flag], is_flag=True, hidden=True)


class ElasticOption(click.Option):
    """Is an error that gives the reason."""

    def __init__(self, spellings: tuple[str, ...], num_values: int) -> None:
        super().__init__(spellings, nargs=num_values, hidden=True, callback=self._refuse)

    def _refuse(self, ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            raise click.UsageError(
                f"{'/'.join(self.opts)}: there is no elastic training, as the number of ranks of "
                "an MPI job is fixed; leave the option out, and after a failure restart from a "
                "checkpoint"
            )


def runtime_options() -> list[click.Option]:
    """All of them, in the order of the tables."""
    options: list[click.Option] = []
    for knob in KNOBS:
        options += [KnobOption(knob)] if knob.flag else []
        options += [KnobOption(knob, switches_off=True)] if knob.off_flag else []
    options += [IdleOption(flag, takes, why) for flag, _, takes, why in WITHOUT_EFFECT]
    return [*options, *(ElasticOption(*row) for row in ELASTIC)]


def settings(
    params: Iterable[click.Parameter],
    given: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables that the given options set for the ranks. environ: hvdrun's own, which the
    ranks inherit."""
    return {
        option.knob.variable: option.value_of(given[str(option.name)])
        for option in params
        if isinstance(option, KnobOption)
        and is_given(option, given)
        and not _says_more(option.knob, environ or {})
    }


def _says_more(knob: Knob, environ: Mapping[str, str]) -> bool:
    """The variable has a value that no flag can say, as virtual:8, and that includes the flag's."""
    word = environ.get(knob.variable, "").strip().lower()
    return bool(knob.counted) and word.startswith(f"{knob.counted}:")


def idle_notes(params: Iterable[click.Parameter], given: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each given option that does nothing."""
    return tuple(
        f"{option.opts[0]} has no effect: {option.why}"
        for option in params
        if isinstance(option, IdleOption) and is_given(option, given)
    )


def is_given(option: click.Option, given: Mapping[str, Any]) -> bool:
    value = given.get(str(option.name))
    return value is not None and value is not False
