"""What hvdrun says about a failure: the facts of each text, its words, and which one is chosen."""

import ast
import errno
import re
import signal
import string

import pytest

from hvdrun.errors import LaunchError, LeftEarly, exit_codes
from hvdrun.reports import failure_report as words
from hvdrun.reports.failure_report import (
    Failure,
    FailureReport,
    duration,
    lines_of,
    of_error,
    of_rank,
)
from tests.harness.worlds import ROOT

TRACEBACK = ("Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: x")
ENDS = ("code 3", "signal 11", "signal 9", "signal 99", "oom 9", f"shm 7 {63 << 20}/{64 << 20}")
FACTS = {"rank": 1, "host": "server2", "after_s": 61.0, "silent_s": 31.0, "pause_s": 8.0}
FACTS |= {"limit_s": 30.0, "since_s": 61.0, "before_s": 2.0, "status": 213, "code": 143}
FACTS["failure"] = Failure(0, "server1", "code 14", 4.25)
TABLES = {"error": words._CAUSES, "note": words._NOTES}


def names_in(text):
    return {name for _, name, *_ in string.Formatter().parse(text) if name}


def known(names):
    """The names that facts have, in a text: 'after' is made from 'after_s'."""
    return names | {name.removesuffix("_s") for name in names}


def calls():
    """Each call of `error` and `note` in the launcher: which, of what, with which facts."""
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            name = name.removeprefix("failure_report.")
            if name in TABLES and node.args and isinstance(node.args[0], ast.Constant):
                given = {word.arg for word in node.keywords} | {"rank", "host"}
                yield name, node.args[0].value, given


def test_every_text_is_used_and_gets_the_facts_that_it_names():
    used = set()
    for table, name, given in calls():
        texts = TABLES[table][name]
        texts = " ".join(texts[1:]) if table == "error" else texts
        used.add((table, name))
        if None not in given:  # **facts
            assert names_in(texts) <= known(given), name
    chosen = {"no program", "no right to run", "no agent", "no login"}
    everything = {(table, name) for table in TABLES for name in TABLES[table]}
    assert used | {("error", name) for name in chosen} == everything


def test_the_words_for_each_cause(snapshot):
    lines = []
    for name, (kind, what, remedy) in words._CAUSES.items():
        placeholders = {each: f"<{each}>" for each in names_in(what + remedy)}
        found = words.error(name, **{**placeholders, **FACTS})
        assert type(found) is kind
        assert (found.rank, found.host) == (1, "server2")
        assert str(found).endswith(found.remedy)
        lines.append(f"{name}: {found.word}, exit code {found.code}\n    {found}\n")
    for name, text in words._NOTES.items():
        placeholders = {each: f"<{each}>" for each in names_in(text)}
        lines.append(f"{name}:\n    {words.note(name, **{**placeholders, **FACTS})}\n")
    snapshot("causes", "\n".join(lines))


def test_the_words_for_each_end_of_a_rank(snapshot):
    def told(ended, num_proc=4, repeat=True, **more):
        report = of_rank(Failure(1, "server2", ended, 12.34), **more)
        return [f"{report.cause}:", *lines_of(report, num_proc, repeat), ""]

    where = {"waited_at": "train.py:12 in main"}
    lines = [line for ended in ENDS for line in told(ended, evidence=("its words",), **where)]
    lines += told("code 1", evidence=TRACEBACK, same=(0, 1, 2, 5), num_proc=8, **where)
    lines += told("code 1", evidence=TRACEBACK, repeat=False, notes=("hvdrun: a note",))
    lines += [*told("code 1", 2), *told("code 1", 1, evidence=TRACEBACK)]
    snapshot("ranks", "\n".join(lines))


@pytest.mark.parametrize(("ended", "code"), [*zip(ENDS, (3, 139, 137, 227, 137, 135), strict=True)])
def test_the_exit_code_is_that_of_the_rank(ended, code):
    assert Failure(0, "server1", ended, 1.0).exit_code == code


def test_the_words_on_signals(snapshot):
    lines = [
        words.interrupted(signal.SIGINT, None, 4, 3.0),
        words.interrupted(signal.SIGTERM, None, 1, 20.0, of_nodes=True),
        words.interrupted(signal.SIGINT, None, 4, 0.0),
        words.interrupted(signal.SIGINT, None, 0, 3.0),
        words.interrupted(signal.SIGINT, signal.SIGINT, 4, 3.0),
        words.interrupted(signal.SIGTERM, signal.SIGINT, 4, 3.0),
    ]
    snapshot("signals", "\n".join(lines))


def test_every_cause_is_a_word_of_a_closed_list_and_has_an_exit_code_between_64_and_79():
    kinds = LaunchError.__subclasses__()
    codes = [kind.code for kind in kinds]
    assert len(set(codes)) == len(kinds)
    assert all(64 <= code <= 79 for code in codes)
    assert all(kind.cause and f"{kind.code}  {kind.cause}" in exit_codes() for kind in kinds)
    page = (ROOT / "docs/reference/supervision.md").read_text().partition("| cause | is |")[2]
    listed = re.findall("`([a-z-]+)`", page.partition("\n\n")[0].replace("`evidence`", ""))
    causes = {kind.word for kind in [*kinds, LeftEarly]} | {
        end.cause for end in words._ENDS.values()
    }
    assert {kind.word for kind, *_ in words._CAUSES.values()} < causes
    assert sorted(listed) == sorted(causes | {"internal-error"})


def test_a_report_has_what_the_error_knows():
    error = words.error("left early", 1, "server2", after_s=4.2)
    assert of_error(error, evidence=("x",)) == FailureReport(
        "left-early", 1, "server2", error.remedy, evidence=("x",)
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.25, "4.2 s"), (59.9, "59.9 s"), (185.9, "3 min 05 s"), (26 * 3600 + 200, "26 h 03 min")],
)
def test_a_long_time_is_told_in_minutes_and_hours(seconds, text):
    assert duration(seconds) == text


def test_the_words_on_hosts_that_do_not_start(snapshot):
    """Which text is chosen by what ssh, the login shell or MPI's daemon said."""
    python = "/venv/bin/python"
    said = [
        b"ssh: Could not resolve hostname server9: Name or service not known\r\n",
        b"ssh: connect to host server2 port 22: Connection refused\r\n",
        b"Host key verification failed.\r\n",
        b"bob@server2: Permission denied (publickey).\r\n",
        b"srun: error: Unable to create step for job 7: Requested node configuration is not\n",
        b"bash: line 1: /venv/bin/python: No such file or directory\n",
        # This one has reached the host.
        b"python: no such file\nsrun: error: n2: task 0: Exited with exit code 127\n",
        b"Connection to server2 closed.\r\n",
        b"",
    ]
    found = [words.unreachable("server2", each, python) for each in said]
    found.append(words.unreachable("server2", b"", python, b"Welcome\nThis account is locked.\n"))
    found.append(words.daemon_failed("server2", 127, b"bash: orted: command not found\n"))
    found.append(words.daemon_failed("server2", 213, b"one\ntwo\n\nthree\nfour\n"))
    found.append(words.daemon_failed("server2", 213, b""))
    found.append(words.missing_program("tarin.py", 2, "server2", errno.ENOENT))
    found.append(words.missing_program("./train.py", 0, "server1", errno.EACCES))
    found.append(words.host_silent("server2", 30.0, 30.0, ["b", "c"], b"ssh: it broke\n"))
    not_started = [("server2", 2, "ssh has not connected"), ("server3", 1, "")]
    found.append(words.not_started(not_started, 30.0))
    many = {(f"h{each}", f"h{each + 1}"): [each] for each in range(6)}
    found.append(words.misplaced(many, "mpirun"))
    snapshot("hosts", "\n\n".join(f"{error.word}:\n    {error}" for error in found))
