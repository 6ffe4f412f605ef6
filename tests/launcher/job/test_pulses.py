"""How far ranks are, by what they have sent lately."""

from hvdrun.job.pulses import Pulses
from hvdrun.pulse import Pulse, encode


def heard(*sent):
    """sent: when each pulse came, and the number of steps in it."""
    pulses = Pulses()
    for at, steps in sent:
        pulses.add(at, 3, encode(Pulse(at, steps, steps / 10, 0, 0)))
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
        pulses.add(now, 3, encode(pulse))
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
