"""Many hosts asked at once, with stand-ins for ssh; and what is remembered of the answers."""

import json
import os
import sys
import time

import pytest

from hvdrun.agent.frames import FACTS, HELLO, frame
from hvdrun.preflight.ask_hosts import Conversation, reads_its_input
from hvdrun.preflight.cache import LIFETIME_S, AnswerCache, cache_folder
from hvdrun.preflight.question import script_of


def ask(commands, limit_s, **options):
    with Conversation(commands, os.environ, **options) as hosts:
        return hosts.answers(limit_s)


def shell(text):
    return ["sh", "-c", text]


def saying(value, before="", after=""):
    """A host agent's answer, from a shell."""
    said = HELLO + frame(FACTS, payload=json.dumps(value).encode())
    octal = "".join(f"\\{byte:03o}" for byte in said)
    return shell(f"{before}printf '{octal}'; {after}")


def test_an_answer_is_found_among_what_start_up_files_print():
    value = {"time_s": time.time(), "text": "ü\n"}
    before = "yes noise | head -c 300000; printf '\\nhvdrun-host'; echo oh >&2; "
    replies = ask({"a": saying(value, before, "echo logged out")}, 10.0)
    assert replies["a"].answer == value
    assert abs(replies["a"].clock_skew_s) < 1


@pytest.mark.parametrize(
    "answer",
    [{"time_s": None}, {"time_s": "now"}, {"time_s": []}, {"time_s": 10**400}, {}, [], "x"],
    ids=str,
)
def test_an_answer_that_no_host_agent_gives_is_an_empty_one(answer):
    """Which another version of hvdrun may have given."""
    assert ask({"a": saying(answer)}, 10.0)["a"].answer == {}


def test_an_answer_that_has_no_end_is_an_empty_one():
    said = "".join(f"\\{byte:03o}" for byte in HELLO + b"f\xff\xff\xff\xff\x40\0\0\0")
    assert ask({"a": shell(f"printf '{said}'; exec cat /dev/zero")}, 10.0)["a"].answer == {}


def test_what_has_answered_is_not_waited_for():
    begin = time.monotonic()
    reply = ask({"a": saying({"time_s": time.time()}, after="exec sleep 30")}, 20.0)["a"]
    assert reply.answer is not None
    assert time.monotonic() - begin < 15


def test_what_holds_stderr_in_the_background_is_not_waited_for(tmp_path):
    begin = time.monotonic()
    over = tmp_path / "over"
    holds = f"while [ ! -e {over} ]; do sleep 0.05; done >/dev/null &"
    reply = ask({"a": shell(f"{holds} echo why >&2; exit 255")}, 20.0)["a"]
    over.touch()
    assert (reply.answer, reply.exit_code, reply.stderr) == (None, 255, "why\n")
    assert time.monotonic() - begin < 15


def test_what_never_answers_is_ended_at_the_time_limit():
    replies = ask({name: shell("exec sleep 30") for name in "abc"}, 0.2)
    assert [replies[name].exit_code for name in "abc"] == [None] * 3


def test_a_start_up_file_that_reads_a_line_gets_one():
    reply = ask({"a": saying({"time_s": time.time()}, "read line; ")}, 60.0)["a"]
    assert reply.answer is not None
    assert not reply.came_at_the_end


@pytest.mark.parametrize(("before", "reads"), [("cat; ", True), ("sleep 2.2; ", False)])
def test_a_start_up_file_that_reads_to_the_end_is_told_from_a_slow_host(before, reads):
    command = saying({"time_s": time.time()}, before)
    reply = ask({"a": command}, 4.0)["a"]
    assert reply.answer is not None
    assert reads_its_input(command, os.environ, reply, 4.0) == reads


def test_the_words_of_a_command_without_an_answer_are_kept():
    reply = ask({"a": shell("echo not available; echo why >&2; exit 1")}, 20.0)["a"]
    assert (reply.exit_code, reply.stdout, reply.stderr) == (1, "not available\n", "why\n")


ECHOES = """
import os, time
from hvdrun.agent.frames import *
write_all(1, HELLO + frame(FACTS, payload=b'{"time_s": 1}'))
buffer = bytearray()
while data := os.read(0, CHUNK):
    buffer = bytearray((buffer + data).lstrip(b"\\n"))
    for kind, _, payload in unpack(buffer):
        if kind == ORDER:
            write_all(1, frame(ORDER, payload=payload))
"""


def test_hosts_that_have_answered_get_orders():
    hosts = {"a": [sys.executable, "-c", ECHOES], "b": saying({"time_s": 1})}
    with Conversation(hosts, os.environ) as conversation:
        assert set(conversation.answers(20.0)) == {"a", "b"}
        for number in (1, 2):
            orders = {"a": {"n": number}, "b": {}}
            assert conversation.order(orders, 20.0) == {"a": {"n": number}}
        kept = conversation.keep("abc")
    assert list(kept) == ["a"]
    assert kept["a"].process.poll() is None
    kept["a"].kill()
    assert kept["a"].process.returncode is not None


def test_a_host_that_answers_an_order_late_is_connected_to_anew():
    late = ECHOES.replace("if kind == ORDER:", "if kind == ORDER and not time.sleep(5):")
    with Conversation({"a": [sys.executable, "-c", late]}, os.environ) as conversation:
        assert set(conversation.answers(20.0)) == {"a"}
        assert conversation.order({"a": {}}, 0.2) == {}
        assert conversation.keep("a") == {}


def test_more_hosts_than_are_asked_at_once_all_answer(monkeypatch):
    monkeypatch.setattr("hvdrun.preflight.ask_hosts.AT_ONCE", 3)
    calls = {f"{i}": saying({"time_s": time.time(), "number": i}) for i in range(8)}
    replies = ask(calls, 20.0)
    assert {name: reply.answer["number"] for name, reply in replies.items()} == {
        f"{i}": i for i in range(8)
    }


@pytest.mark.parametrize("skew_s", [-100.0, 100.0])
def test_a_clock_is_wrong_by_what_the_call_can_not_explain(skew_s):
    reply = ask({"a": saying({"time_s": time.time() + skew_s})}, 10.0)["a"]
    assert reply.clock_skew_s == pytest.approx(skew_s, abs=10)


def test_no_answer_is_left_open(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    ask({"a": shell("exit 1"), "b": saying({"time_s": 1.0}), "c": shell("exec sleep 9")}, 0.2)
    assert set(os.listdir("/proc/self/fd")) == before


def test_answers_are_remembered_for_an_hour(tmp_path):
    cache = AnswerCache(tmp_path / "new" / "folder")
    key = ["ssh", {"a": 1}]
    assert cache.get(key) is None
    cache.put(key, {"x": [1]})
    assert AnswerCache(tmp_path / "new" / "folder").get(key) == {"x": [1]}
    assert cache.get(["ssh", {"a": 2}]) is None
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert path.stat().st_mode & 0o77 == 0
    for age_s in (LIFETIME_S + 1, -60):
        os.utime(path, (time.time() - age_s,) * 2)
        assert cache.get(key) is None
    os.utime(path, (time.time() - LIFETIME_S - 1,) * 2)
    cache.put("other", 1)
    assert not path.exists()


def test_answers_can_be_forgotten(tmp_path):
    cache = AnswerCache(tmp_path)
    cache.put("key", 1)
    cache.forget()
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_remembered_nothing_is(tmp_path):
    (tmp_path / "file").write_text("")
    for cache in (AnswerCache(None), AnswerCache(tmp_path / "file" / "folder")):
        cache.put("key", 1)
        assert cache.get("key") is None
    broken = AnswerCache(tmp_path)
    broken.put("key", 1)
    (tmp_path / broken.used[0]).write_text("{")
    assert broken.get("key") is None


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/hvdrun/preflight"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/hvdrun/preflight"),
        ({"HOME": "/h"}, "/h/.cache/hvdrun/preflight"),
        ({}, "None"),
    ],
    ids=str,
)
def test_the_cache_lies_where_the_user_has_such_things(environ, folder):
    assert str(cache_folder(environ)) == folder


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["python", "train.py", "-c", "x"], "train.py"),
        (["/venv/bin/python3.11", "-u", "-W", "error", "-Xdev", "a b.py"], "a b.py"),
        (["python", "-m", "train"], None),
        (["python", "-um", "train"], None),
        (["python", "-c", "pass", "train.py"], None),
        (["python", "-"], None),
        (["python"], None),
        (["./train.py", "x.py"], None),
        ([], None),
    ],
    ids=str,
)
def test_the_script_is_what_python_would_run(words, script):
    assert script_of(words) == script


def test_a_program_that_is_not_there_is_an_error_at_once():
    with pytest.raises(FileNotFoundError):
        ask({"a": ["/no/such/ssh"]}, 5.0)
