"""Whole engines of up to hundreds of hosts, in one process over a network in memory (hosts.c)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.compiled import compiled, linked, sources
from tests.harness.programs import run_program

LEAST_TAG_UB = 32767  # that MPI promises
TAGS_PER_NUMBER = 8
NUMBERS = 32  # of a coordinator, at least
LATE = 50  # looks that a message may take


def core_sources(name: str) -> list[Path]:
    """A test's own file, and all of the core that needs no Python."""
    core = [
        source
        for source in sources("*/*")
        if source.stem != "exit" and source.parent.name != "python"
    ]
    return [Path(__file__).with_name(f"{name}.c"), *core]


def program(folder: Path, name: str, *options: str) -> Path:
    return linked(folder / name, map(compiled, core_sources(name)), *options)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Runs the program with the given arguments, and returns what it prints."""
    path = program(tmp_path_factory.mktemp("hosts"), "hosts")

    def run(*arguments, limit_s=60):
        finished = run_program([path, *map(str, arguments)], limit_s)
        assert finished.code == 0, finished
        return finished.stdout

    return run


@pytest.mark.parametrize(
    ("num_hosts", "tag_ub", "num_plans", "num_calls", "late"),
    [
        # Of 32 numbers plans keep 20, and the other host keeps notes of the other 12 back.
        (2, 16 + TAGS_PER_NUMBER * NUMBERS * 2, 20, 13, 0),
        (3, 16 + TAGS_PER_NUMBER * NUMBERS * 3, 24, 40, LATE),
        (128, LEAST_TAG_UB, 2, 33, LATE),
        pytest.param(127, LEAST_TAG_UB, 2, 33, LATE, marks=pytest.mark.wide),
        pytest.param(400, LEAST_TAG_UB, 24, 33, LATE, marks=pytest.mark.wide),
    ],
)
def test_operations_never_wait_for_a_number_that_only_a_later_one_would_free(
    hosts, num_hosts, tag_ub, num_plans, num_calls, late
):
    total = num_hosts * num_calls
    said = hosts("agree", num_hosts, tag_ub, num_plans, num_calls, late)
    assert said == f"plans failed 0: \nerror 0, ended {total} of {total}, right {total}\n"


def test_plans_that_would_use_up_all_numbers_fail_and_what_is_no_plan_goes_on(hosts):
    said = hosts("agree", 4, 16 + TAGS_PER_NUMBER * NUMBERS * 4, 25, 40, LATE)
    assert said == (
        "plans failed 4: plan 'operation 106' finds no tag for its messages: this MPI's largest "
        "tag is 1040, and on 4 hosts 24 plans use up those of its coordinator; use fewer at once "
        "(a larger HVDLITE_BUCKET_BYTES makes fewer plans)\n"
        "error 0, ended 160 of 160, right 160\n"
    )


def test_failing_everything_takes_as_many_steps_as_there_are_operations(hosts):
    # One after the other from the start of the table, these would take minutes.
    assert hosts("fail", 2, 300_000, limit_s=20) == "failed 300000\n"
