"""What ranks have told of their training: how far they are, and for how long none has told of a
step."""

import json

from hvdrun.job.actions import Answer
from hvdrun.job.events import MetricsAsked, RankSaid
from hvdrun.job.progress import Measured, Pulses
from hvdrun.machine import notes
from hvdrun.pulse import Pulse
from hvdrun.pulse import encode as encode_pulse
from hvdrun.records import TELLS_AT_LEAST_EVERY_S, Record, encode
from tests.launcher.job.histories import begun, command, play


def heard(*sent):
    """sent: when each pulse came, and the number of steps in it."""
    pulses = Pulses()
    for at, steps in sent:
        pulses.add(at, 3, encode_pulse(Pulse(at, steps, steps / 10, 0, 0)))
    return pulses.of(3)


def test_of_a_rank_that_has_told_nothing_nothing_is_known():
    assert Pulses().of(3) is None


def test_one_pulse_is_compared_with_itself():
    found = heard((1.0, 5))
    assert found.last == found.before
    assert found.moved_at == 1.0


def test_the_last_one_is_compared_with_that_of_twelve_seconds_ago():
    found = heard(*[(float(at), 10.0 * at) for at in range(0, 40, 2)])
    assert (found.before.steps, found.last.steps) == (260, 380)


def test_where_steps_take_long_the_last_one_is_compared_with_the_step_before():
    found = heard((0.0, 1), (60.0, 2), (120.0, 3))
    assert (found.before.steps, found.last.steps) == (2, 3)


def test_a_rank_that_makes_no_step_was_seen_to_move_when_it_made_its_last():
    found = heard((0.0, 1), (2.0, 2), (4.0, 2), (30.0, 2))
    assert found.moved_at == 2.0
    assert (found.before.steps, found.last.steps) == (1, 2)


def test_the_steps_of_all_optimizers_tell_whether_a_rank_moves():
    pulses = Pulses()
    first = Pulse(0.0, 800, 40.0, 0, 0, all_steps=800)
    other = first._replace(steps=801, optimizer=1, all_steps=801 + 800, seconds=50.0)
    for now, pulse in ((0.0, first), (2.0, first._replace(all_steps=1601)), (4.0, other)):
        pulses.add(now, 3, encode_pulse(pulse))
    found = pulses.of(3)
    assert found.moved_at == 2.0
    assert found.before == found.last == other  # is not compared with the first


def test_after_another_world_has_begun_nothing_is_compared_with_the_first():
    found = heard((0.0, 100), (2.0, 120), (4.0, 3))
    assert found.before == found.last
    assert found.last.steps == 3


def test_what_is_no_pulse_changes_nothing():
    pulses = Pulses()
    pulses.add(0.0, 3, b"{}")
    assert pulses.of(3) is None


# So long is usual: the pause, and two steps of a second.
USUAL_S = TELLS_AT_LEAST_EVERY_S + 3.0
STEPS = Record(11, 10.0, 1.0)


def silent_s(now, *told):
    """told: by rank, its records, a second apart, the last one at 0 s."""
    found = Measured(command(a=2))
    for rank, records in enumerate(told):
        for at, record in enumerate(records, 1 - len(records)):
            found.add(float(at), rank, encode(record))
    return found.silent_s(now)


def test_it_counts_from_the_last_note_of_a_step_once_that_is_longer_ago_than_usual():
    assert silent_s(USUAL_S, [STEPS]) is None
    assert silent_s(USUAL_S + 0.5, [STEPS]) == USUAL_S + 0.5


def test_the_longest_steps_of_late_say_what_is_usual():
    long = Record(101, 20.0, 1.0, recent=Record(3, 60.0, 1.0))
    assert silent_s(USUAL_S + 50.0, [STEPS], [long]) is None
    assert silent_s(USUAL_S + 60.0, [STEPS], [long]) == USUAL_S + 60.0


def test_a_note_without_a_new_step_does_not_count():
    again = STEPS._replace(cpu=50.0)  # such as that of a rank that leaves
    assert silent_s(60.0, [STEPS, again]) == 61.0
    other = STEPS._replace(recent=Record(3, 0.5, 0.1))  # by a second optimizer
    assert silent_s(60.0, [STEPS, other]) == 60.0


def test_before_there_are_steps_and_after_the_job_nothing_is_said():
    assert silent_s(1e6) is None
    assert silent_s(1e6, [Record(0, 10.0, 1.0)]) is None
    assert silent_s(None, [STEPS]) is None


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
