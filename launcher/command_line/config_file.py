"""`--config-file`: options in YAML, in the sections that Horovod has for them.

    num_proc: 8                     # an option of hvdrun, '_' for '-'
    hosts: [server1:4, server2:4]
    stall_check:                    # a section of Horovod's
      warning_time_seconds: 120

The command line wins over the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import click
import yaml
from click.core import ParameterSource

from hvdrun.command_line.hvdrun_option import HvdrunOption
from hvdrun.errors import UsageError
from hvdrun.plan.hosts import parse_hosts

# Section → the prefix that makes its keys options; the keys whose option has another name.
SECTIONS: dict[str, tuple[str, Mapping[str, str]]] = {
    "params": ("", {}),
    "autotune": ("autotune_", {"enabled": "autotune"}),
    "timeline": ("timeline_", {}),
    "stall_check": ("stall_check_", {"enabled": "stall_check"}),
    "library_options": ("", {}),
    "logging": ("log_", {}),
}
KEYS: dict[str, tuple[str, ...]] = {
    "params": (
        *("fusion_threshold_mb", "cycle_time_ms", "cache_capacity", "hierarchical_allreduce"),
        *("hierarchical_allgather", "torus_allreduce"),
    ),
    "autotune": (
        *("enabled", "log_file", "warmup_samples", "steps_per_sample", "bayes_opt_max_samples"),
        "gaussian_process_noise",
    ),
    "timeline": ("filename", "mark_cycles"),
    "stall_check": ("enabled", "warning_time_seconds", "shutdown_time_seconds"),
    "library_options": (
        *("mpi_threads_disable", "num_nccl_streams", "gloo_timeout_seconds", "thread_affinity"),
    ),
    "logging": ("level", "with_timestamp", "without_timestamp", "hide_timestamp"),
}


class _Mistake(Exception):
    """A mistake in the file; `node` shows where."""

    def __init__(self, node: Any, message: str) -> None:
        super().__init__(message)
        self.node = node


def option_callback(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Makes the file's values the defaults of the other options, which are parsed later."""
    if path is not None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                ctx.default_map = read(file.read(), path, ctx)
        except OSError as error:
            raise UsageError(f"--config-file {path}: {error.strerror}") from error
    return path


def prefer_command_line(ctx: click.Context) -> None:
    """Drops values of the file that the command line overrides with another option."""
    groups = [["hosts", "hostfile"]]
    groups += [[n, f"no_{n}"] for n in ctx.params if f"no_{n}" in ctx.params]
    for group in groups:
        source = {name: ctx.get_parameter_source(name) for name in group}
        if ParameterSource.COMMANDLINE in source.values():
            for name in group:
                if source[name] is ParameterSource.DEFAULT_MAP:
                    ctx.params[name] = None


def read(text: str, path: str, ctx: click.Context) -> dict[str, Any]:
    """The values of the file, by the names of the command's parameters.

    Raises UsageError with the file and line, and for an unknown key with the nearest known one;
    HostListError for a mistake in the hosts.
    """
    options = {
        key: option
        for option in ctx.command.params
        if isinstance(option, click.Option) and getattr(option, "in_config_file", True)
        for key in _keys(option)
    }
    values: dict[str, Any] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        for key, node in _entries(root, "the file") if root is not None else ():
            if key == "controller":
                _check_controller(node)
            elif key in SECTIONS:
                begin, others = SECTIONS[key]
                for inner, value in _entries(node, key):
                    if inner not in KEYS[key]:
                        raise _Mistake(value, _unknown(inner, KEYS[key], f" in section {key!r}"))
                    values |= _value(options, others.get(inner, begin + inner), value, ctx)
            elif key in options:
                values |= _value(options, key, node, ctx)
                if key == "hosts":
                    parse_hosts(values[key], f"{path}:{node.start_mark.line + 1}: {key}")
            else:
                raise _Mistake(node, _unknown(key, {*SECTIONS, *options}))
    except _Mistake as mistake:
        line = mistake.node.start_mark.line + 1
        raise UsageError(f"{path}:{line}: {mistake}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UsageError(f"{path}:{line}: this is not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(
            f"{path}:{line}: this is not valid YAML: it has the character U+{error.character:04X}"
        ) from None
    except RecursionError:
        raise UsageError(f"{path}:1: lists or sections are nested too deeply") from None
    return values


def _keys(parameter: click.Parameter) -> Iterator[str]:
    """The names of an option in the file."""
    for spelling in parameter.opts:
        if spelling.startswith("--"):
            yield spelling[2:].replace("-", "_")
    if not any(spelling.startswith("--") for spelling in parameter.opts):
        yield str(parameter.name)


def _entries(node: Any, what: str) -> Iterator[tuple[str, Any]]:
    """Each key with its value, which gets the line number of the key."""
    if node.id != "mapping":
        raise _Mistake(node, f"{what} should have lines such as 'key: value', not {_found(node)}")
    seen = set()
    for key_node, value in node.value:
        key = str(key_node.value).replace("-", "_") if key_node.id == "scalar" else ""
        value.start_mark = key_node.start_mark
        if key in seen:
            raise _Mistake(value, f"{key} is given twice; leave one of them out")
        seen.add(key)
        yield key, value


def _unknown(key: str, known: Collection[str], where: str = "") -> str:
    near = get_close_matches(key, known, 1)
    meant = (
        f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(sorted(known))}"
    )
    return f"{key!r} is not an option{where}{meant}"


def _check_controller(node: Any) -> None:
    if str(node.value).lower() != "mpi":
        raise _Mistake(node, f"controller should be mpi, the only one, not {_found(node)}")


def _value(
    options: Mapping[str, click.Option], key: str, node: Any, ctx: click.Context
) -> dict[str, Any]:
    option = options[key]
    from_list = option.from_list if isinstance(option, HvdrunOption) else None
    name = str(option.name)
    given: Any
    if option.is_flag:
        if _kind(node) != "bool":
            raise _Mistake(node, f"{key} should be true or false, not {_found(node)}")
        given = node.value.lower() in ("true", "yes", "on")
        opposite = options.get(f"no_{key}")
        if not given and opposite is not None:
            name, option, given = str(opposite.name), opposite, True
    elif option.multiple or (node.id == "sequence" and from_list):
        if node.id != "sequence":
            raise _Mistake(node, f"{key} should be a list, as in [a, b], not {_found(node)}")
        words = [_text(f"an entry of {key}", entry) for entry in node.value]
        given = from_list(words) if from_list else words
    else:
        given = _scalar(option, key, node)
    try:
        option.process_value(ctx, given)
    except click.UsageError as error:
        raise _Mistake(node, f"{key}: {error.message.rstrip('.')}") from None
    return {name: given}


def _scalar(option: click.Parameter, key: str, node: Any) -> str:
    wanted = {click.types.IntParamType: "a whole number", click.types.FloatParamType: "a number"}
    for kind, words in wanted.items():
        allowed = ("int",) if kind is click.types.IntParamType else ("int", "float")
        if isinstance(option.type, kind) and _kind(node) not in allowed:
            raise _Mistake(node, f"{key} should be {words}, not {_found(node)}")
    return _text(key, node)


def _text(what: str, node: Any) -> str:
    if node.id != "scalar" or _kind(node) == "null":
        raise _Mistake(node, f"{what} should be a single text, not {_found(node)}")
    if "\0" in node.value:
        raise _Mistake(node, f"{what} contains a NUL character, which no argument can hold")
    return str(node.value)


def _kind(node: Any) -> str:
    return str(node.tag).rpartition(":")[2]


def _found(node: Any) -> str:
    if node.id != "scalar":
        return {"sequence": "a list", "mapping": "a section"}[node.id]
    return "nothing" if _kind(node) == "null" else repr(node.value)
