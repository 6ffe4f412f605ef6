"""Puts a run of some parts into the report of an earlier run of more. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

# What a report has outside of its runs.
OUTSIDE = ("memory", "copies", "asynchronous", "servers", "instructions")
# What a run has beside its parts.
ABOUT_A_RUN = ("place", "mpi", "mpi_version")


def merged(found: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The report with what `earlier` has of parts that this one lacks. Its key "earlier" tells
    which parts those are, and the host and commit that they were measured on."""
    new = parts(found)
    kept = [without(run, new) for run in earlier.get("runs", ())]
    # Those of an earlier run that itself kept some, before those that it measured.
    origins = [
        *earlier.get("earlier", ()),
        {"parts": parts(earlier) - parts_of_origins(earlier), "host": earlier["host"]},
    ]
    remaining = [
        {"parts": sorted(set(origin["parts"]) - new), "host": origin["host"]} for origin in origins
    ]
    return {
        **{name: earlier[name] for name in OUTSIDE if name in earlier},
        **found,
        "runs": [*(run for run in kept if parts({"runs": [run]})), *found["runs"]],
        "earlier": [origin for origin in remaining if origin["parts"]],
    }


def parts(report: Mapping[str, Any]) -> set[str]:
    """What a report has figures of."""
    of_runs = {name for run in report["runs"] for name in run if name not in ABOUT_A_RUN}
    return of_runs | {name for name in OUTSIDE if report.get(name)}


def parts_of_origins(report: Mapping[str, Any]) -> set[str]:
    return {part for origin in report.get("earlier", ()) for part in origin["parts"]}


def without(run: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key not in names}
