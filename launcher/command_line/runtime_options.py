"""The runtime's options: each knob's flag sets its variable for all ranks. hvdrun accepts flags of
horovodrun that have no effect here, and says so; it refuses those of elastic training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from hvdrun.command_line.hvdrun_option import HvdrunOption, IdleOption, whole_numbers
from hvdrun.knobs import KNOBS, Knob

# Flags of horovodrun's that have no effect here, below the reason: each with its variable, and the
# type of its value, if it has them.
_IDLE = """
there are no cycles: an operation starts as soon as all ranks have posted it
    --cycle-time-ms HOROVOD_CYCLE_TIME float
there is no response cache: repeated operations reuse a plan
    --cache-capacity HOROVOD_CACHE_CAPACITY int
reductions are always done within each host first
    --hierarchical-allreduce HOROVOD_HIERARCHICAL_ALLREDUCE
    --no-hierarchical-allreduce
allgather is always done within each host first
    --hierarchical-allgather HOROVOD_HIERARCHICAL_ALLGATHER
    --no-hierarchical-allgather
the algorithm of each size is fixed, so that a training run repeats bitwise
    --autotune HOROVOD_AUTOTUNE
there is no autotuning to switch off
    --no-autotune
there is no autotuning
    --autotune-log-file HOROVOD_AUTOTUNE_LOG text
    --autotune-warmup-samples HOROVOD_AUTOTUNE_WARMUP_SAMPLES int
    --autotune-steps-per-sample HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE int
    --autotune-bayes-opt-max-samples HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES int
    --autotune-gaussian-process-noise HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE float
the thread level that MPI was started with decides
    --mpi-threads-disable HOROVOD_MPI_THREADS_DISABLE
    --no-mpi-threads-disable
NCCL is used through torch
    --num-nccl-streams HOROVOD_NUM_NCCL_STREAMS int
hvdrun gives each rank its share of the cores; see --binding-args
    --thread-affinity HOROVOD_THREAD_AFFINITY int
there is no Gloo here
    --gloo-timeout-seconds HOROVOD_GLOO_TIMEOUT_SECONDS int
logging is Python's: set a format there
    --log-with-timestamp
logging is Python's
    --log-hide-timestamp HOROVOD_LOG_HIDE_TIME
    --no-log-hide-timestamp
    --log-without-timestamp
there are no cycles to mark
    --timeline-mark-cycles HOROVOD_TIMELINE_MARK_CYCLES
    --no-timeline-mark-cycles
it chooses an algorithm of NCCL's, and hvdlite chooses the algorithm itself
    --torus-allreduce HOROVOD_TORUS_ALLREDUCE
    --no-torus-allreduce
the ranks always run on MPI
    --gloo
    --use-gloo
    --communication - text
the ranks always run on MPI; --mpi NAME chooses which one
    --use-mpi
MPI's transport is chosen by --mpi-args, NCCL's by NCCL's own variables
    --tcp
"""


def _rows(table: str) -> Iterator[tuple[str, str, str, str]]:
    why = ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            why = line
        else:
            flag, variable, kind = (*line.split(), "", "")[:3]
            yield flag, variable.strip("-"), kind, why


# Flag, variable, type, reason.
WITHOUT_EFFECT = tuple(_rows(_IDLE))

ELASTIC: tuple[tuple[tuple[str, ...], int], ...] = (
    # (spellings of a flag of elastic training, the number of its values)
    (("--min-np", "--min-num-proc"), 1),
    (("--max-np", "--max-num-proc"), 1),
    (("--slots-per-host",), 1),
    (("--elastic-timeout",), 1),
    (("--reset-limit",), 1),
    (("--blacklist-cooldown-range",), 2),
    (("--host-discovery-script",), 1),
)

GROUP = "Runtime"  # the heading in --help


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
