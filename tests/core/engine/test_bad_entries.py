"""What a rank reads in the shared log, or in a message, that no sound rank has written.

Engines of two hosts in one process, over a network in memory (bad_entries.c)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.compiled import with_core
from tests.harness.programs import run_program


@pytest.fixture(scope="module")
def bad_entries(tmp_path_factory):
    """Runs the program with arguments, and returns what it prints."""
    path = with_core(
        tmp_path_factory.mktemp("bad") / "program", Path(__file__).with_name("bad_entries.c")
    )

    def run(*arguments):
        finished = run_program([path, *arguments], 60)
        assert finished.code == 0, finished
        return finished.stdout

    return run


def test_a_missing_query_takes_no_answer_that_is_out_of_range(bad_entries):
    waits = "allreduce 'x' has not ended within 1 s: rank 1 on here has not called it"
    assert bad_entries("ask") == f"{waits}; there does not answer\n"


@pytest.mark.parametrize(
    ("how", "text"),
    [("endless", f"1023 characters, {'x' * 30}"), ("empty", "18 characters, the caller gave up")],
)
def test_the_text_of_who_gives_up_has_an_end_and_is_not_empty(bad_entries, how, text):
    assert bad_entries(how) == f"{how}: {text}\n"


@pytest.mark.parametrize(
    "how",
    [
        *("variants", "payload", "part", "site", "host", "rank", "kind"),
        *("done", "number", "messages", "left"),
    ],
)
def test_a_message_that_lies_about_itself_ends_the_job_and_names_its_sender(bad_entries, how):
    assert bad_entries("hear", how).startswith(
        "rank 2 on there sent a control message that is damaged (type "
    )


def test_a_message_that_does_not_lie_changes_nothing(bad_entries):
    assert bad_entries("hear", "nothing") == "pending\n"
