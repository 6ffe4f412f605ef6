"""What comes from a rank, another host or a file may be anything: it is read or refused with the
error that the reader promises, and nothing else happens.

The texts are valid ones with random edits, which get further than random bytes.
"""

import contextlib
import json
import os
import re

from hypothesis import example, given
from hypothesis import strategies as st

from hvdrun.agent import frames
from hvdrun.agent.rank.notes import RankStack
from hvdrun.command_line import config_file
from hvdrun.command_line.cli import cli
from hvdrun.errors import HostListError, UsageError
from hvdrun.job.course import Course, Supervision
from hvdrun.job.events import RankSaid
from hvdrun.machine.looks import look
from hvdrun.machine.notes import PULSE
from hvdrun.monitor.figures import Verdicts, figures_of
from hvdrun.monitor.view import Look, line, render
from hvdrun.plan.hosts import parse_hostfile, parse_hosts
from hvdrun.plan.request import Request
from hvdrun.pulse import Pulse
from hvdrun.pulse import encode as encode_pulse
from hvdrun.records import Record, Sample, encode, parse, summary_of
from hvdrun.rendezvous import messages
from hvdrun.reports import late
from hvdrun.reports.looks import activity, read_look
from hvdrun.reports.whereabouts import Seen, entries, read_stall
from tests.launcher.job.histories import command

LOOK = json.dumps(
    {
        "at": 5.5,
        "processes": [
            [7, 1, "S", 0.5, "python train.py", True, "reads from /data/x"],
            [8, 7, "D", 1e3, "cp", False, ""],
        ],
        "frames": [["/a/train.py", 7, "load", ""], ["/b/torch/x.py", 1, "f", "torch"]],
        "no_frames": "",
        "quotas": {"/cpu/job": [15, 7]},
        "stopped_s": 4.5,
    }
).encode()
STALLS = [
    b"allreduce 'x' has waited 60 s for rank 1 on b (which has been in y); called by ranks 0, 2-4;",
    b"allreduce 'x' has made no progress for 60 s, after 3 of 10 pieces",
]
HELLO = messages.pack_hello(messages.Hello("0.1.0", 1, 2, "server2", None, 0, 4))
RUN = messages.pack_run(messages.Run("3", ("mpirun", "-np", "2")))
RECORDS = [
    b'{"steps": 100, "seconds": 3.5, "waited": 0.25}',
    *(
        encode(Record(40, 4.0, w, samples=tuple(Sample(s, 0.1, w / 40, 0) for s in range(40))))
        for w in (0.0, 2.0)
    ),
]
PULSES = [
    encode_pulse(Pulse(4.0, 40, 3.9, 1.0, 0.5, 39, {"loss": 0.25, "lr": 1e-3})),
    encode_pulse(Pulse(6.0, 60, 5.9, 1.5, 0.7)),
]
HOSTS = [b"server1:4,server2:4", b"me@[fe80::1%eth0]:2,a", b"10.0.0.1 b:1"]
HOST_FILES = [b"# all\nserver1 slots=4\nserver2:2 # two\n", b"me@a slots=2 max_slots=4\n\n[::1]\n"]
YAML = [
    b"num_proc: 8\nhosts: [server1:4, server2:4]\nstall_check:\n  warning_time_seconds: 120\n",
    b"params: {fusion_threshold_mb: 32, cycle_time_ms: 1.5}\nverbose: true\nmpi_args: '-x A'\n",
    b"logging:\n  level: &a DEBUG\nstart_timeout: *a\ntimeline: {filename: !!str x}\n",
]
ODD = [b"\0", b"\x1b[2J", b"\xff\xfe", b"-1", b"1e999", b"NaN", b"null", b"[" * 5000, b"9" * 5000]
ODD += [
    "\u2028\u0661\ud7ff😀".encode(),
    b"\n",
    b":",
    b",",
    b"-",
    b"{}",
    b"[]",
    b'""',
    b"&a *a",
    b"%",
]


@st.composite
def edited(draw, texts):
    """One of the texts with up to four edits."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 12)))
        put = draw(
            st.one_of(st.sampled_from(ODD), st.just(text[at:end] * 2), st.binary(max_size=4))
        )
        text = text[:at] + put + text[end:]
    return text


def texts(*given):
    return edited(list(given)).map(lambda data: data.decode(errors="replace"))


@given(edited([LOOK]))
@example(b'{"at": NaN, "processes": [[7, 1, "S", Infinity, "x", 0, ""]]}')
@example(b'{"at": 1, "processes": [[7, 1, "", 0, "x", 0, ""]], "frames": [["", 0, "", ""]]}')
def test_a_look_of_a_rank_is_shown_or_passed_over(data):
    found = read_look(data)
    if found is None:
        return
    for before in (None, found):
        shown = activity(before, found)
        shown += "".join(entries({3: Seen("server1", before, found)}, "/a"))
        assert shown.isprintable()


@given(texts(*STALLS))
@example("x has waited 1 s for y; called by ranks 0-99999999999;")
@example("x has waited 1 s for y; called by ranks -, ,;")
def test_a_report_of_the_stall_check_is_read_as_far_as_it_is_one(text):
    stall = read_stall(text, 6)
    assert stall.operation.isprintable() or not stall.operation
    assert {*stall.missing, *stall.waiting} <= set(range(6))
    assert len(stall.missing) + len(stall.waiting) <= 12


@given(st.lists(edited(RECORDS), min_size=1, max_size=3))
def test_a_record_of_a_rank_counts_or_is_passed_over(given):
    records = {rank: record for rank, data in enumerate(given) if (record := parse(data))}
    if records:
        lines = [summary_of(records, len(given)), *late.report(records, str)]
        assert all(line.isprintable() for line in lines)


@given(st.lists(edited(PULSES), min_size=1, max_size=4))
@example([b'{"at":1,"steps":9e11,"seconds":1e-300,"waited":9e11,"data":9e11,"step":9e11}'])
@example([b'{"at":1,"steps":1,"seconds":1,"waited":1,"data":1,"values":{"loss":1e999}}'])
def test_a_pulse_of_a_rank_is_shown_or_passed_over(given):
    course = Course(command(a=2), 0.0, Supervision(Request(())))
    for number, data in enumerate(given):
        course.on(float(number), RankSaid(number % 2, PULSE, data))
    figures = figures_of(course, 20.0, Verdicts())
    assert line(figures).isprintable()
    for drawn in render(figures, Look(80, 24, coloured=False), ()):
        assert re.sub(r"\x1b\[1?m|\x1b\[0m", "", drawn.text).isprintable()


@given(edited([HELLO, RUN, b"12", b"3.5", b"{}"]))
def test_a_message_of_another_node_is_understood_or_refused(data):
    for unpack in (
        messages.unpack_hello,
        messages.unpack_run,
        frames.number,
    ):
        with contextlib.suppress(frames.BadFrame):
            unpack(data)


@given(edited([b"4711 61 5\0/a/hvdlite\0/a/torch\0/usr/lib/python3"]))
def test_a_note_about_a_stack_is_used_or_refused(data):
    try:
        stack = RankStack(data, os.memfd_create("test"))
    except ValueError:
        return
    # Of another process, or of none: its signal would go to a stranger.
    found, why = stack.read()
    stack.close()
    assert (found, bool(why)) == ([], True)


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=1), st.integers(-1, 99), st.binary())),
    st.data(),
)
def test_frames_come_out_as_they_went_in_wherever_the_bytes_are_cut(sent, data):
    stream = b"".join(frames.frame(*each) for each in sent)
    buffer, received = bytearray(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        buffer += stream[:cut]
        stream = stream[cut:]
        received += frames.unpack(buffer)
    assert (received, buffer) == (sent, b"")


@given(texts(*HOSTS))
def test_a_list_of_hosts_is_read_or_refused(text):
    hosts, error = read_or_error(parse_hosts, text, "-H")
    assert "-H" in error if error else all(host.name for host in hosts)


@given(texts(*HOST_FILES))
def test_a_host_file_is_read_or_refused(text):
    hosts, error = read_or_error(parse_hostfile, text, "hosts")
    assert "hosts" in error if error else all(host.name for host in hosts)


@given(texts(*YAML))
def test_a_config_file_is_read_or_refused_with_its_line(text):
    ctx = cli.make_context("hvdrun", ["true"])
    _, error = read_or_error(config_file.read, text, "job.yaml", ctx)
    assert not error or re.match(r"job\.yaml:\d+: ", error)


def read_or_error(read, *arguments):
    try:
        return read(*arguments), ""
    except (UsageError, HostListError) as error:
        return None, str(error) or "nothing"


def test_the_look_of_this_test_is_what_a_keeper_sends():
    known = json.loads(LOOK)
    sent = json.loads(look(os.getpid(), ([["/a.py", 1, "f", ""]], "")))
    assert sent.keys() == known.keys()
    assert [type(x) for x in sent["processes"][0]] == [type(x) for x in known["processes"][0]]
