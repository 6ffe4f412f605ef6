"""Hosts that are not ready yet when hvdrun begins: a stand-in for ssh fails for them at first."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from hvdrun.command_line.cli import main
from hvdrun.plan import facts, flavour
from hvdrun.plan.hosts import parse_hosts
from hvdrun.plan.request import Request
from hvdrun.preflight import preflight
from hvdrun.preflight.ask_hosts import Conversation
from hvdrun.preflight.reply import Reply
from hvdrun.preflight.waiting import Waiting
from tests.launcher.preflight.test_preflight import hosts, stand_in  # noqa: F401

UNKNOWN = "ssh: Could not resolve hostname {}: Name or service not known"
REFUSED = "ssh: connect to host {} port 22: Connection refused"
CLOSED = "kex_exchange_identification: Connection closed by remote host"
NO_ROUTE = "ssh: connect to host {} port 22: No route to host"
TIMED_OUT = "ssh: connect to host {} port 22: Connection timed out"
NO_KEY = "ann@{}: Permission denied (publickey)."
KEY_UNKNOWN = "Host key verification failed."
# Counts the questions to a host: "$n" is the number of this one.
COUNT = "echo >> asked-$host; n=$(wc -l < asked-$host); "
ANSWER = 'exec sh -c "$command"'


def failed(words, code=255):
    return Reply(None, code, words.format("h1"), 0.1)


def answered():
    return Reply({"time_s": 1.0}, None, "", 0.1)


class Heard:
    """A Waiting that began at 100 s, and its lines."""

    def __init__(self, limit_s=60.0, unfit=()):
        self.lines = []
        self.waiting = Waiting(
            100.0, limit_s, 20.0, lambda host, _: host in unfit, self.lines.append
        )

    def __getattr__(self, name):
        return getattr(self.waiting, name)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("hvdrun.preflight.waiting.FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("hvdrun.preflight.waiting.LONGEST_PAUSE_S", 0.1)


@pytest.mark.parametrize("words", [UNKNOWN, REFUSED, CLOSED, NO_ROUTE, TIMED_OUT])
def test_what_may_end_by_itself_is_asked_about_again(words):
    assert Heard().again_at(101.0, "h1", failed(words)) == 102.0


def test_a_host_that_is_silent_after_ssh_began_is_asked_again():
    assert Heard().again_at(120.0, "h1", failed("", code=None)) == 121.0


@pytest.mark.parametrize("words", [NO_KEY, KEY_UNKNOWN, "who knows"])
def test_what_waiting_can_not_mend_ends_the_wait_for_all(words):
    heard = Heard()
    assert heard.again_at(101.0, "h1", failed(REFUSED)) == 102.0
    assert heard.again_at(101.0, "h2", failed(words)) is None
    assert heard.is_over(101.0)
    heard.tell(101.0, all_have_replied=True)
    assert heard.lines == []
    assert heard.end(101.0, has_failed=True) is None


def test_a_program_that_fails_over_there_ends_the_wait():
    heard = Heard()
    assert heard.again_at(101.0, "h1", failed("Connection refused", code=127)) is None
    assert heard.is_over(101.0)


def test_an_answer_that_shows_something_unfit_ends_the_wait():
    heard = Heard(unfit=["h2"])
    assert heard.again_at(101.0, "h1", answered()) is None
    assert not heard.is_over(101.0)
    assert heard.again_at(101.0, "h2", answered()) is None
    assert heard.is_over(101.0)


def test_the_pauses_grow_and_the_last_question_comes_before_the_limit():
    heard, now, asked = Heard(), 100.0, []
    while (at := heard.again_at(now, "h1", failed(REFUSED))) is not None:
        now = at
        asked.append(now - 100)
    assert asked[:6] == [1.0, 2.5, 4.75, 8.125, 13.125, 18.125]
    assert 59 < asked[-1] < 60
    assert heard.end(160.0, has_failed=True) == 60.0


def test_a_line_names_the_hosts_by_their_causes_once_all_have_replied():
    heard = Heard()
    heard.again_at(100.1, "h1", failed(UNKNOWN))
    heard.again_at(100.1, "h2", failed(UNKNOWN))
    heard.tell(100.2, all_have_replied=False)
    assert heard.lines == []
    heard.again_at(100.3, "h3", failed(CLOSED))
    heard.tell(100.3, all_have_replied=True)
    line = (
        "waiting up to 60 s (--start-timeout) for h1, h2 (the name is unknown here) and h3 (its"
        " ssh server closes the connection)"
    )
    assert heard.lines == [line]
    heard.again_at(102.0, "h1", failed(REFUSED))
    heard.tell(102.0, all_have_replied=True)
    assert heard.lines == [line]
    assert heard.end(107.4, has_failed=False) is None
    assert heard.lines == [line, "all hosts have answered, after 7 s"]


def test_a_host_that_never_replies_does_not_hold_up_the_line_and_gets_its_own_later():
    heard = Heard()
    heard.again_at(100.1, "h1", failed(REFUSED))
    heard.tell(101.2, all_have_replied=False)
    heard.again_at(110.1, "h2", failed(TIMED_OUT))
    heard.tell(110.2, all_have_replied=True)
    assert [re.findall(r"h\d", line) for line in heard.lines] == [["h1"], ["h2"]]


def test_many_hosts_are_counted():
    heard = Heard()
    for number in range(1, 65):
        heard.again_at(100.1, f"h{number}", failed(UNKNOWN))
    heard.tell(100.2, all_have_replied=True)
    assert "for h1, h2, h3 and 61 more (the name is unknown here)" in heard.lines[0]


def test_a_host_that_was_there_before_the_line_is_not_named():
    heard = Heard()
    heard.again_at(100.1, "h1", failed(REFUSED))
    heard.again_at(100.9, "h1", answered())
    heard.tell(101.5, all_have_replied=True)
    heard.end(101.5, has_failed=False)
    assert heard.lines == []


def test_hosts_that_become_ready_get_the_job_and_the_others_are_not_asked_again(
    stand_in,  # noqa: F811
    quick,
    capsys,
    monkeypatch,
    tmp_path,
):
    # h1 answers when the others have failed, and these, once both are in one line.
    monkeypatch.setattr("hvdrun.preflight.waiting.SAY_AFTER_S", 30.0)
    say = preflight._say
    monkeypatch.setattr(preflight, "_say", lambda text: (say(text), (tmp_path / "said").touch()))
    stand_in(
        f"""{COUNT}
        [ $host = h1 ] && while [ ! -e asked-h2 ] || [ ! -e asked-h3 ]; do sleep 0.01; done
        [ $host = h2 ] && [ $n = 1 ] && {{ echo '{UNKNOWN.format("h2")}' >&2; exit 255; }}
        [ $host = h2 ] && [ $n = 2 ] && {{ echo '{REFUSED.format("h2")}' >&2; exit 255; }}
        [ $host = h3 ] && [ $n = 1 ] && {{ echo '{CLOSED}' >&2; exit 255; }}
        [ $host = h1 ] || while [ ! -e said ]; do sleep 0.01; done
        {ANSWER}"""
    )
    monkeypatch.setenv("SSH_CONNECTION", "")
    request = Request(("true",), hosts=parse_hosts(hosts(3)))
    seen = preflight.run(request, flavour.detect("auto", os.environ), facts.gather(request))
    for connection in seen.connections.values():  # no job goes on with them
        connection.kill()
    assert list(seen.hosts) == ["h1", "h2", "h3"]
    assert seen.waited_s is None
    asked = {host: len((tmp_path / f"asked-{host}").read_text()) for host in seen.hosts}
    assert asked == {"h1": 1, "h2": 3, "h3": 2}
    first, last = capsys.readouterr().err.splitlines()
    assert first == (
        "hvdrun: waiting up to 60 s (--start-timeout) for h2 (the name is unknown here) and h3 (its"
        " ssh server closes the connection)"
    )
    assert re.fullmatch(r"hvdrun: all hosts have answered, after \d+ s", last)


@pytest.mark.parametrize("words", [UNKNOWN, REFUSED])
def test_a_host_that_never_is_ready_ends_the_job_at_the_limit_with_the_table(
    stand_in,  # noqa: F811
    quick,
    capsys,
    tmp_path,
    words,
):
    stand_in(f"{COUNT} [ $host = h1 ] && {ANSWER}; echo '{words.format('h2')}' >&2; exit 255")
    begin = time.monotonic()
    assert main(["-H", hosts(2), "--start-timeout", "5", "true"]) == 70
    assert time.monotonic() - begin >= 4.9
    first, summary, *rows = capsys.readouterr().err.splitlines()
    assert first.startswith("hvdrun: waiting up to 5 s (--start-timeout) for h2 (")
    assert re.fullmatch(
        r"hvdrun: 1 of 2 hosts is not ready after \d+ s \(--start-timeout\), and nothing was"
        r" started",
        summary,
    )
    assert [row.split()[0] for row in rows if " failed " in row] == ["h2"]
    assert len((tmp_path / "asked-h1").read_text()) == 1
    assert len((tmp_path / "asked-h2").read_text()) > 2


@pytest.mark.parametrize(
    ("variables", "whose"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h[1-2]"}, "Slurm job around hvdrun (srun is"),
        ({"LSB_MCPU_HOSTS": "h1 1 h2 1"}, "LSF job around hvdrun; -H"),
    ],
)
def test_hosts_of_a_scheduler_are_not_waited_for_and_the_error_says_whose_they_are(
    stand_in,  # noqa: F811
    capsys,
    monkeypatch,
    tmp_path,
    variables,
    whose,
):
    stand_in(f"{COUNT} echo '{UNKNOWN.format('h1')}' >&2; exit 255")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # Also where a machine has Slurm's srun.
    found = shutil.which
    monkeypatch.setattr(
        "shutil.which", lambda name, **where: None if name == "srun" else found(name, **where)
    )
    assert main(["--start-timeout", "600", "true"]) == 70
    summary, *_ = capsys.readouterr().err.splitlines()
    assert summary.startswith("hvdrun: 2 of 2 hosts are not ready, and nothing was started; the")
    assert f"those of the {whose}" in summary
    assert len((tmp_path / "asked-h1").read_text()) == 1


def test_check_asks_each_host_once(stand_in, capsys, tmp_path):  # noqa: F811
    stand_in(f"{COUNT} echo '{REFUSED.format('h1')}' >&2; exit 255")
    assert main(["-H", hosts(2), "--check"]) == 70
    assert "waiting" not in capsys.readouterr().err
    assert len((tmp_path / "asked-h1").read_text()) == 1


def test_an_unfit_host_ends_the_job_although_another_is_waited_for(
    stand_in,  # noqa: F811
    capsys,
):
    stand_in(
        f"""{COUNT} [ $host = h1 ] && {{ echo '{REFUSED.format("h1")}' >&2; exit 255; }}
        while [ ! -e asked-h1 ]; do sleep 0.01; done; {ANSWER}"""
    )
    assert main(["-H", hosts(2), "--start-timeout", "600", "/no/such/program"]) == 70
    said = capsys.readouterr().err
    assert "hvdrun: 2 of 2 hosts are not ready, and nothing was started" in said
    assert re.search(r"h1 +ssh +failed +the connection was refused", said)
    assert re.search(r"h2 +program +failed", said)


def test_ctrl_c_ends_the_wait(stand_in):  # noqa: F811
    stand_in(f"echo '{UNKNOWN.format('h1')}' >&2; exit 255")
    hvdrun = subprocess.Popen(
        [sys.executable, "-m", "hvdrun", "-H", hosts(1), "--start-timeout", "600", "true"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert hvdrun.stderr.readline() == (
        "hvdrun: waiting up to 600 s (--start-timeout) for h1 (the name is unknown here)\n"
    )
    hvdrun.send_signal(signal.SIGINT)
    assert hvdrun.communicate(timeout=30)[1].strip() == "hvdrun: Ctrl-C: no rank has been started"
    assert hvdrun.returncode == 130


COUNTS_SIGNS_OF_LIFE = """
import os, sys
from hvdrun.agent.frames import *
write_all(1, HELLO + frame(FACTS, payload=b'{{"time_s": 1}}'))
buffer = bytearray()
while data := os.read(0, CHUNK):
    buffer = bytearray((buffer + data).lstrip(b"\\n"))
    for kind, _, payload in unpack(buffer):
        if kind == PING:
            print(file=open({path!r}, "a"))
        if kind == ORDER:
            write_all(1, frame(ORDER, payload=payload))
"""


def test_those_that_have_answered_stay_while_another_is_waited_for(quick, tmp_path):
    lines = tmp_path / "lines"
    lines.touch()
    counts = [sys.executable, "-c", COUNTS_SIGNS_OF_LIFE.format(path=str(lines))]
    # The second one is there when the first has heard that it is still wanted.
    there = shlex.join([sys.executable, "-c", COUNTS_SIGNS_OF_LIFE.format(path="/dev/null")])
    late = (
        f"[ $(wc -l < {lines}) -gt 1 ] && exec {there}; echo '{REFUSED.format('b')}' >&2; exit 255"
    )
    commands = {"a": counts, "b": ["sh", "-c", late]}
    waiting = Waiting(time.monotonic(), 60.0, 20.0, lambda *_: False, lambda _: None)
    with Conversation(commands, os.environ) as conversation:
        replies = conversation.answers(20.0, waiting=waiting)
        assert [replies[key].answer for key in "ab"] == [{"time_s": 1}] * 2
        assert conversation.order({"a": {"n": 1}}, 20.0) == {"a": {"n": 1}}
