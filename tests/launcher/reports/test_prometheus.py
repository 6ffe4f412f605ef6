"""The file for Prometheus, by the grammar of its text format, and what stands in it."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdrun.records import Record
from hvdrun.reports import prometheus
from tests.launcher.reports.test_late import BASE_S, always, host_of, job

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL_NAME, LABEL_VALUE = r"[a-zA-Z_][a-zA-Z0-9_]*", r'(?:[^"\\\n]|\\["\\n])*'
LABEL = rf'{LABEL_NAME}="{LABEL_VALUE}"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)?\}})? ([0-9.e+-]+)")
UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def read(text):
    """Its values by name and labels. Refuses what the grammar does not allow: a family's HELP and
    TYPE come once each, before its samples, which stand together; no sample comes twice."""
    assert text.endswith("\n")
    kinds, helped, values, families = {}, set(), {}, []
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, words = re.fullmatch(rf"# HELP ({NAME}) ((?:[^\\\n]|\\[\\n])+)", line).groups()
            assert name not in helped
            assert words
            helped.add(name)
            continue
        if line.startswith("# TYPE "):
            name, kind = re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge)", line).groups()
            assert name in helped
            assert name not in kinds
            assert name.endswith("_total") == (kind == "counter")
            kinds[name] = kind
            families.append(name)
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name = found[1]
        assert families[-1] == name, "its type comes first, and its samples stand together"
        pairs = re.findall(rf'({LABEL_NAME})="({LABEL_VALUE})"', found[2] or "")
        labels = {
            label: re.sub(r'\\[\\n"]', lambda each: UNESCAPED[each[0]], value)
            for label, value in pairs
        }
        assert len(labels) == len(pairs)
        key = name, frozenset(labels.items())
        assert key not in values
        values[key] = float(found[3])
    assert helped == set(kinds) == {name for name, _ in values}
    return values


def of(values, name, **labels):
    return values.get((f"hvdlite_{name}", frozenset(labels.items())))


def test_each_rank_has_its_counters_and_the_job_its_gauges():
    records = {
        0: Record(11, 10.0, 2.5, 1.5, 30.0, 100.0, 40.0),
        1: Record(1, 5.0, 5.0),  # whose only step warmed up
    }
    values = read(prometheus.text_of(records, host_of, {"hvdrun": 4700}, 3, is_running=True))
    ids = {"hvdrun": "4700", "rank": "0", "host": "server1"}
    found = {
        name: of(values, name, **ids)
        for name in (
            *("steps_total", "step_seconds_total", "computing_seconds_total"),
            *("data_seconds_total", "waited_seconds_total", "cpu_seconds_total"),
            *("cpu_periods_total", "cpu_throttled_periods_total"),
        )
    }
    assert list(found.values()) == [11, 10.0, 6.0, 1.5, 2.5, 30.0, 100.0, 40.0]
    assert of(values, "steps_total", **ids | {"rank": "1"}) == 1
    assert of(values, "step_seconds_total", **ids | {"rank": "1"}) is None
    assert of(values, "ranks", hvdrun="4700") == 3
    assert of(values, "running", hvdrun="4700") == 1
    assert of(values, "silent_seconds", hvdrun="4700") == 0
    assert len(values) == 3 + 8 + 1


def test_what_was_true_in_the_last_minute_is_left_out_if_no_rank_makes_steps():
    records = job([always(BASE_S), always(0.25), always(BASE_S)])
    moving, silent = (
        read(prometheus.text_of(records, host_of, {}, 3, True, silent_s))
        for silent_s in (None, 40.0)
    )
    assert (of(moving, "silent_seconds"), of(silent, "silent_seconds")) == (0, 40)
    gone = {name for name, _ in moving} - {name for name, _ in silent}
    assert gone == {"hvdlite_last_ratio", "hvdlite_late_seconds"}


def test_who_is_late_counts_in_the_last_minute():
    recent = job([always(BASE_S), always(0.25), always(BASE_S)])
    records = {
        rank: record._replace(recent=recent[rank])
        for rank, record in job([always(0.25), always(BASE_S), always(BASE_S)]).items()
    }
    values = read(prometheus.text_of(records, host_of, {}, 3, is_running=False))
    assert of(values, "last_ratio", rank="1", host="server1") == 1.0
    assert of(values, "last_ratio", rank="0", host="server1") == 0.0
    assert of(values, "late_seconds", rank="1", host="server1", cause="computing") == 0.25 - BASE_S
    assert [name for name, _ in values].count("hvdlite_late_seconds") == 1
    assert of(values, "running") == 0


@settings(max_examples=50)
@given(
    st.lists(st.builds(Record, *[st.floats(0, 1e11)] * 8, size=st.just(2)), max_size=3),
    st.text(max_size=8),
)
def test_whatever_ranks_send_and_hosts_are_called_the_file_can_be_read(records, host):
    text = prometheus.text_of(dict(enumerate(records)), lambda rank: host, {"hvdrun": 1}, 3, True)
    hosts = {dict(labels).get("host") for _, labels in read(text)}
    assert hosts <= {None, host}
    assert (host in hosts) == bool(records)
