"""For how long no rank has told of a step."""

import json

from hvdrun.job.actions import Answer
from hvdrun.job.events import MetricsAsked, RankSaid
from hvdrun.job.steps_told import StepsTold
from hvdrun.machine import notes
from hvdrun.records import TELLS_AT_LEAST_EVERY_S, Record
from tests.launcher.job.histories import begun, play

# So long is usual: the pause, and two steps of a second.
USUAL_S = TELLS_AT_LEAST_EVERY_S + 3.0
STEPS = Record(11, 10.0, 1.0)


def told(*records):
    """By rank 0, a second apart, the last one at 0 s."""
    found, before = StepsTold(), None
    for at, record in enumerate(records, 1 - len(records)):
        found.add(float(at), 0, before, record)
        before = record
    return found


def silent_s(found, now, *records):
    return found.silent_s(now, dict(enumerate(records)))


def test_it_counts_from_the_last_note_of_a_step_once_that_is_longer_ago_than_usual():
    found = told(STEPS)
    assert silent_s(found, USUAL_S, STEPS) is None
    assert silent_s(found, USUAL_S + 0.5, STEPS) == USUAL_S + 0.5


def test_the_longest_steps_of_late_say_what_is_usual():
    long = Record(101, 20.0, 1.0, recent=Record(3, 60.0, 1.0))
    assert silent_s(told(long), USUAL_S + 50.0, STEPS, long) is None
    assert silent_s(told(long), USUAL_S + 60.0, STEPS, long) == USUAL_S + 60.0


def test_a_note_without_a_new_step_does_not_count():
    again = STEPS._replace(cpu=50.0)  # such as that of a rank that leaves
    assert silent_s(told(STEPS, again), 60.0, again) == 61.0
    other = STEPS._replace(recent=Record(3, 0.5, 0.1))  # by a second optimizer
    assert silent_s(told(STEPS, other), 60.0, other) == 60.0


def test_before_there_are_steps_nothing_is_said():
    nothing = Record(0, 10.0, 1.0)
    assert silent_s(StepsTold(), 1e6) is None
    assert silent_s(told(nothing), 1e6, nothing) is None


def test_who_asks_is_told():
    data = json.dumps({"steps": 11, "seconds": 10, "waited": 1}).encode()
    events = [
        *begun(),
        (10.0, RankSaid(0, notes.SUMMARY, data)),
        (20.0, MetricsAsked(4)),
        (50.0, MetricsAsked(5)),
        (50.0, MetricsAsked(6, as_json=True)),
    ]
    _, actions, _ = play(events)
    texts = [action.text for _, action in actions if isinstance(action, Answer)]
    assert [text.startswith("no rank has told of a step for 40 s;") for text in texts[:2]] == [
        False,
        True,
    ]
    assert json.loads(texts[2])["silent"] == 40.0
