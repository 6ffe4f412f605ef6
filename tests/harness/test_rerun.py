"""A test that fails for a known bug of MPICH runs once more, and no other test does."""

import re
import sys
from pathlib import Path

import pytest

from tests.harness.programs import Finished, run_program
from tests.harness.worlds import ROOT, RanksFailed

LIMIT_S = 60.0
# What MPI_Init of MPICH prints then, on two streams. A failure may show one of them only.
UCX = "address.c:985  UCX  ERROR failed to unpack address, invalid bandwidth 0.00"
MPICH = (
    "MPIDI_UCX_comm_addr_exchange(159).....:  ucx function returned with failed status"
    "(ucx_init.c 159 MPIDI_UCX_comm_addr_exchange Invalid parameter)"
)
# The same call fails with another reason.
OTHER = MPICH.replace("Invalid parameter", "Out of memory")
PYTEST = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "tests.conftest"]


def fail_by_world(words):
    raise RanksFailed(f"case on 2 ranks under mpich:\n{words}")


def fail_by_program(words):
    done = Finished(15, "up\n", f"Abort\n{words}\n")
    assert done.code == 0, done


def fail_by_job(words):
    pytest.fail(f"the job did not start:\n{words}")


FORMS = {form.__name__: form for form in (fail_by_world, fail_by_program, fail_by_job)}


def fails_in(place, words, form, times, counts):
    """In a test of the session that is looked at: fails as often as `times` says."""
    count = Path(counts, place)
    count.write_text(count.read_text() + "." if count.exists() else ".")
    if len(count.read_text()) <= times:
        FORMS[form](words)


def session(folder, cases, *options):
    """pytest's output for tests that fail, each given by its name, words, form, times and place."""
    lines = ["import pytest", "from tests.harness.test_rerun import fails_in"]
    for name, words, form, times, in_fixture in cases:
        call = f"fails_in({name!r}, {words!r}, {form!r}, {times}, {str(folder)!r})"
        fixture, test = (call, "pass") if in_fixture else ("pass", call)
        lines += ["@pytest.fixture", f"def ranks_{name}():", f"    {fixture}"]
        lines += [f"def test_{name}(ranks_{name}):", f"    {test}"]
    (folder / "test_it.py").write_text("\n".join(lines) + "\n")
    return run_program(
        [*PYTEST, "-p", "no:cacheprovider", "-v", *options, folder / "test_it.py"], LIMIT_S
    )


KNOWN = {
    f"{words}_{form}{'_in_a_fixture' * in_fixture}": (text, form, in_fixture)
    for words, text in {"ucx": UCX, "mpich": MPICH}.items()
    for form in FORMS
    for in_fixture in (False, True)
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """The words behind each test's name, in order, in one session; and its last line."""
    folder = tmp_path_factory.mktemp("rerun")
    done = session(
        folder,
        [
            *((name, words, form, 1, place) for name, (words, form, place) in KNOWN.items()),
            ("fails_twice", UCX, "fail_by_job", 2, False),
            ("other_reason", OTHER, "fail_by_job", 1, False),
        ],
    )
    assert done.code == 1, done
    runs = re.findall(r"^\S*::test_(\w+) (\w+) ", done.stdout, re.MULTILINE)
    return {name: [word for of, word in runs if of == name] for name, _ in runs}, done.stdout


@pytest.mark.parametrize("name", KNOWN)
def test_a_failure_with_these_words_is_followed_by_a_second_try(verdicts, name):
    words, said = verdicts
    assert words[name] == ["RERUN", "PASSED"], said
    summary = said.partition("rerun test summary info")[2]
    assert re.search(rf"^RERUN \S*::test_{name}$", summary, re.MULTILINE), said


def test_there_is_no_third_try(verdicts):
    words, said = verdicts
    assert words["fails_twice"] == ["RERUN", "FAILED"], said


def test_another_failure_is_final(verdicts):
    words, said = verdicts
    assert words["other_reason"] == ["FAILED"], said
    assert f"2 failed, {len(KNOWN)} passed, {len(KNOWN) + 1} rerun in " in said


@pytest.mark.wide
def test_a_debugger_stops_at_the_first_failure(tmp_path):
    done = session(tmp_path, [("fails_once", UCX, "fail_by_job", 1, False)], "--pdb")
    assert "(Pdb)" in done.stdout, done
    assert "RERUN" not in done.stdout, done
