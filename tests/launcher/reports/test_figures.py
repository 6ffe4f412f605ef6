"""The figures that `hvdrun --metrics PID --json` prints."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdrun.records import Record
from hvdrun.reports import figures
from tests.launcher.reports.test_late import (
    BASE_S,
    BOTH,
    LOADS,
    MOVES_S,
    always,
    host_of,
    job,
    throttled,
)


def figures_of(records, size=4):
    text = figures.as_json(records, size, host_of)
    assert "\n" not in text
    return json.loads(text, parse_constant=pytest.fail)


def test_of_each_rank_and_of_all():
    found = figures_of(LOADS)
    assert (found["version"], found["size"], found["recent"]) == (1, 4, None)
    whole = found["whole"]
    step_s = BASE_S + 0.25 + MOVES_S
    assert whole["steps"] == 41
    assert whole["ranks"][3] == {
        "rank": 3,
        "host": "server2",
        "steps": 41,
        "seconds": 40 * step_s,
        "computing": 40 * BASE_S,
        "data": 40 * 0.25,
        "waited": 40 * MOVES_S,
        "cpu": 20 * step_s,
        "throttled": 0.0,
        "communication_of_a_step": MOVES_S,
        "last_in": 1.0,
        "last_by": 0.25,
        "last_costs": 0.25,
    }
    assert [row["rank"] for row in whole["ranks"]] == [0, 1, 2, 3]
    assert whole["sum"] == {
        name: sum(row[name] for row in whole["ranks"])
        for name in ("seconds", "computing", "data", "waited", "cpu")
    }
    assert whole["shares"]["data"] == pytest.approx(0.25 / (4 * step_s))
    assert sum(whole["shares"].values()) == pytest.approx(1.0)
    assert whole["late"] == [
        {
            "ranks": [3],
            "hosts": ["server2"],
            "last_in": 1.0,
            "last_by": 0.25,
            "cause": "data",
            "data": {"late": 0.25, "others": 0.0},
            "computing": {"late": BASE_S, "others": BASE_S},
        }
    ]
    assert whole["throttled"] == []
    (verdict,) = whole["verdicts"]
    assert verdict.startswith("rank 3 on server2 arrives last in 100 % of steps, by 250 ms")


def test_the_last_minute_stands_beside_the_whole_job():
    records = {
        rank: record._replace(recent=job(BOTH)[rank])
        for rank, record in job([always(0.5)] * 4).items()
    }
    found = figures_of(records)
    assert (found["whole"]["late"], found["whole"]["steps"]) == ([], 41)
    assert found["recent"]["late"][0]["ranks"] == [2, 3]
    assert found["recent"]["steps"] == found["recent"]["ranks"][0]["steps"] == 40


def test_throttled_ranks_are_listed():
    both = [always(0.5)] * 2
    row = {"rank": 1, "host": "server1", "periods": 0.9}
    whole = figures_of(job(both, **throttled(0.1, 0.9)), 2)["whole"]
    assert whole["throttled"] == [row | {"cores": 0.5, "cores_of": "process"}]
    whole = figures_of(job(both, **throttled(0.1, 0.9), cores=[0.0, 1.25]), 2)["whole"]
    assert whole["throttled"] == [row | {"cores": 1.25, "cores_of": "cgroup"}]


def test_before_ranks_have_told_anything_the_document_is_whole_too():
    whole = figures_of({})["whole"]
    assert (whole["steps"], whole["ranks"], whole["late"]) == (0, [], [])
    assert whole["verdicts"][0].startswith("no rank has told anything: ")
    assert figures_of({0: Record(1, 10.0, 1.0)})["whole"]["ranks"][0]["last_in"] is None


@settings(max_examples=30)
@given(st.lists(st.builds(Record, *[st.floats(0, 1e11)] * 8, size=st.just(2)), max_size=3))
def test_whatever_a_rank_sends_there_are_figures(records):
    recent = [record._replace(recent=record) for record in records]
    assert set(figures_of(dict(enumerate(recent)))) == {
        "version",
        "size",
        "silent",
        "whole",
        "recent",
    }
