"""Reads every setting of the runtime from the environment, in this one place.

The table of settings is `hvdrun.knobs`; the fields here give its rows their types.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import ConfigError
from hvdrun.for_hvdlite import KNOBS

_DEFAULTS: dict[str, Any] = {knob.name: knob.default for knob in KNOBS}


@dataclass(frozen=True)
class Config:
    """The values of the knobs; each field defaults to its knob's default."""

    algorithm: str = _DEFAULTS["algorithm"]
    algorithm_table: str = _DEFAULTS["algorithm_table"]
    alone: bool = _DEFAULTS["alone"]
    as_gloo: bool = _DEFAULTS["as_gloo"]
    black_box: bool = _DEFAULTS["black_box"]
    block_bytes: int = _DEFAULTS["block_bytes"]
    bucket_bytes: int = _DEFAULTS["bucket_bytes"]
    check_numerics: bool = _DEFAULTS["check_numerics"]
    check_parameters: int | str = _DEFAULTS["check_parameters"]
    check_shared: bool = _DEFAULTS["check_shared"]
    deterministic: bool | str = _DEFAULTS["deterministic"]
    event_log: int = _DEFAULTS["event_log"]
    fault: str = _DEFAULTS["fault"]
    first_bucket_bytes: int = _DEFAULTS["first_bucket_bytes"]
    gpu: str = _DEFAULTS["gpu"]
    gpu_binding: bool = _DEFAULTS["gpu_binding"]
    gpu_collectives: str = _DEFAULTS["gpu_collectives"]
    host_ranks: tuple[int, ...] = _DEFAULTS["host_ranks"]
    inline_bytes: int = _DEFAULTS["inline_bytes"]
    log_level: str = _DEFAULTS["log_level"]
    monitored: bool = _DEFAULTS["monitored"]
    piece_bytes: int = _DEFAULTS["piece_bytes"]
    rank_process: str = _DEFAULTS["rank_process"]
    segment_bytes: int = _DEFAULTS["segment_bytes"]
    servers: int = _DEFAULTS["servers"]
    stall_check_disable: bool = _DEFAULTS["stall_check_disable"]
    stall_check_time_seconds: int = _DEFAULTS["stall_check_time_seconds"]
    stall_shutdown_time_seconds: int = _DEFAULTS["stall_shutdown_time_seconds"]
    strict: bool = _DEFAULTS["strict"]
    summary: bool = _DEFAULTS["summary"]
    timeline: str = _DEFAULTS["timeline"]

    @property
    def steps_between_checks(self) -> int:
        """N of HVDLITE_CHECK_PARAMETERS=N or repair:N; 0: parameters are never compared."""
        return int(str(self.check_parameters).removeprefix("repair:"))

    @property
    def repairs_parameters(self) -> bool:
        return str(self.check_parameters).startswith("repair:")

    @property
    def virtual_ranks(self) -> int:
        """V of HVDLITE_DETERMINISTIC=virtual:V; else 0."""
        _, _, number = str(self.deterministic).partition(":")
        return int(number or 0)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Reads the variables; a variable that is not set gives its default.

        Raises:
            ConfigError: a value that can't be parsed; the text names the variable.
        """
        values: dict[str, Any] = {}
        for knob in KNOBS:
            for variable in (knob.variable, knob.horovod):
                text = environ.get(variable)
                if text is None or not variable:
                    continue
                try:
                    values[knob.name] = knob.parse_variable(variable, text)
                except ValueError as error:
                    raise ConfigError(str(error)) from None
                break
        return cls(**values)
