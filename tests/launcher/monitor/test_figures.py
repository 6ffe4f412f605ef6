"""What is known of a job that runs, as figures and in words: from histories, without a clock."""

import math

import pytest

from hvdrun.job.course import Course, Supervision
from hvdrun.job.events import (
    HostConnected,
    HostQuiet,
    HostSilent,
    Interrupted,
    RankEnded,
    RankSaid,
    RankStarted,
)
from hvdrun.machine.notes import PULSE
from hvdrun.monitor.figures import Parts, Value, Verdicts, figures_of
from hvdrun.monitor.view import NO_STEP, line
from hvdrun.plan.request import Request
from hvdrun.pulse import Pulse, encode
from tests.launcher.job.histories import begun, command

FOUND = Verdicts(("rank 3 on b arrives last in 94 % of steps",), dict.fromkeys(range(4), 0.01))


def course_of(*events, starts=True):
    course = Course(command(a=2, b=2), 0.0, Supervision(Request(())))
    for now, event in [*(begun() if starts else ()), *events]:
        course.on(now, event)
    return course


def pulse(at, rank, steps, step_s=0.1, waited=0.0, data=0.0, **more):
    """Of a rank whose steps have all taken the same."""
    made = max(0, steps - 1)
    given = Pulse(at, steps, made * step_s, made * waited, made * data, **more)
    return at, RankSaid(rank, PULSE, encode(given))


def trained(until=20.0, waited=(0.06, 0.05, 0.04, 0.01), data=0.02, **more):
    """Pulses of all ranks, every two seconds."""
    return [
        pulse(float(at), rank, 10 * at, waited=waited[rank], data=data, **more)
        for at in range(2, int(until) + 1, 2)
        for rank in range(4)
    ]


def test_before_a_rank_has_told_anything_that_is_what_is_said():
    figures = figures_of(course_of(), 65.0, Verdicts())
    assert line(figures) == f"0:01:05, {NO_STEP}"
    assert (figures.steps_per_s, figures.still_s) == (None, 0.0)


def test_the_time_of_a_step_goes_into_four_parts():
    figures = figures_of(course_of(*trained()), 21.0, FOUND)
    waiting = (0.05, 0.04, 0.03, 0.0)  # all but the communication, which the records tell
    for rank, each in enumerate(figures.ranks):
        assert (each.rank, each.host, each.state) == (rank, "aabb"[rank], "")
        computing = 0.1 - 0.02 - waiting[rank] - 0.01
        assert each.parts == pytest.approx((computing, 0.02, waiting[rank], 0.01))
        assert each.parts.step_s == pytest.approx(0.1)


def test_without_records_communication_is_what_the_last_rank_waits():
    figures = figures_of(course_of(*trained(waited=(0.06, 0.05, 0.04, 0.02))), 21.0, Verdicts())
    assert [each.parts.communication for each in figures.ranks] == pytest.approx([0.02] * 4)


def test_what_is_shown_is_of_now_and_not_of_the_whole_job():
    """A rank that was slow at first, and then was not."""
    slow = [pulse(at, 0, at / 2, step_s=1.0) for at in (2.0, 4.0)]
    fast = [
        (float(at), RankSaid(0, PULSE, encode(Pulse(at, 10 * at, 1.0 + at / 10, 0, 0))))
        for at in range(6, 31, 2)
    ]
    figures = figures_of(course_of(*slow, *fast), 30.0, Verdicts())
    assert figures.steps_per_s == pytest.approx(100.0)


def test_one_line_has_all_of_it():
    more = {"step": 1200, "values": {"lr": 0.1, "loss": 0.3125}}
    figures = figures_of(course_of(*trained(**more)), 21.0, FOUND)
    assert line(figures) == (
        "0:00:21, step 1200, 10.0 steps/s, loss 0.3125, lr 0.1,"
        " rank 3 on b arrives last in 94 % of steps"
    )


def test_without_a_number_of_its_own_the_optimizers_steps_count():
    figures = figures_of(course_of(*trained()), 21.0, Verdicts())
    assert line(figures) == "0:00:21, 200 steps, 10.0 steps/s"


def test_a_script_without_an_optimizer_is_as_fast_as_it_says():
    told = [pulse(at, 1, 0, step=10 * at, values={"loss": 1.5}) for at in (10.0, 12.0)]
    assert line(figures_of(course_of(*told), 12.0, Verdicts())) == (
        "0:00:12, step 120, 10.0 steps/s, loss 1.5"
    )


def test_a_value_is_the_mean_of_the_ranks_that_report_it():
    told = [pulse(2.0, rank, 5, values={"loss": float(rank)}) for rank in (0, 1, 3)]
    (value,) = figures_of(course_of(*told), 2.0, Verdicts()).values
    assert value == Value("loss", pytest.approx(4 / 3), 3)


def test_the_mean_of_values_whose_sum_no_float_can_hold_is_their_mean():
    told = [pulse(2.0, rank, 5, values={"loss": 1e308}) for rank in range(4)]
    assert figures_of(course_of(*told), 2.0, Verdicts()).values == (Value("loss", 1e308, 4),)


def test_a_script_that_reports_no_step_does_not_stand_still():
    told = [pulse(2.0, rank, 0, values={"loss": 0.5}) for rank in range(4)]
    figures = figures_of(course_of(*told), 60.0, Verdicts())
    assert line(figures) == "0:01:00, loss 0.5"


def test_the_ranks_whose_loss_is_no_number_are_named():
    losses = (1.0, math.nan, math.inf, 3.0)
    told = [pulse(2.0, rank, 5, values={"loss": loss}) for rank, loss in enumerate(losses)]
    figures = figures_of(course_of(*told), 2.0, Verdicts())
    assert "loss nan on ranks 1-2 (2 on the others)" in line(figures)
    figures = figures_of(course_of(*told[1:2]), 2.0, Verdicts())
    assert line(figures).endswith("loss nan on rank 1")


@pytest.mark.parametrize(("now", "said"), [(29.0, False), (32.0, True)])
def test_a_job_in_which_no_rank_makes_a_step_is_seen_to_stand_still(now, said):
    figures = figures_of(course_of(*trained()), now, Verdicts())
    assert ("no step for 12 s" in line(figures)) == said
    assert ("steps/s" in line(figures)) != said


def test_steps_that_take_long_are_no_standstill():
    told = [pulse(60.0 * n, 0, n + 1, step_s=60.0) for n in range(1, 4)]
    figures = figures_of(course_of(*told), 230.0, Verdicts())
    assert figures.still_s == 0
    assert figures.steps_per_s == pytest.approx(1 / 60)


def test_hosts_that_are_silent_or_lost_and_ranks_that_have_ended_are_told():
    connected = (1.0, HostConnected("b"))
    figures = figures_of(course_of(*trained(), (21.0, HostQuiet("b", 6.0, 30.0))), 25.0, FOUND)
    assert figures.troubles == ("no sign of life of b for 10 s",)
    course = course_of(connected, *trained(), (21.0, HostSilent("b", 30.0, 30.0)))
    figures = figures_of(course, 21.0, FOUND)
    assert figures.troubles == ("lost: b", "the job is being ended: 2 ranks still run")
    assert [each.state for each in figures.ranks] == ["", "", "lost", "lost"]
    course = course_of(
        (5.0, RankEnded(1, "code 3", 5.0)), (6.0, RankEnded(0, "asked signal 15", 6))
    )
    figures = figures_of(course, 6.0, FOUND)
    assert [each.state for each in figures.ranks] == ["ended", "failed: code 3", "", ""]
    course = course_of((5.0, Interrupted(2)))
    assert figures_of(course, 6.0, FOUND).troubles == ("the job is being ended: 4 ranks still run",)


def test_until_all_ranks_have_started_their_number_is_told():
    figures = figures_of(course_of((0.5, RankStarted(0)), starts=False), 1.0, Verdicts())
    assert figures.troubles == ("1 of 4 ranks have started",)
    assert [each.state for each in figures.ranks] == ["", *["not started"] * 3]


@pytest.mark.parametrize(
    "sent",
    [
        Pulse(0, 0, 0, 0, 0),
        Pulse(1, 5, 0, 0, 0),
        Pulse(1, 5, 1, 1e11, 1e11),  # waits for longer than it runs
        Pulse(1, 1, 1e11, 0, 0),
        Pulse(1, 0, 0, 0, 0, 1e11, {"loss": 1e308, "x": -math.inf}),
    ],
)
def test_numbers_that_make_no_sense_do_no_harm(sent):
    events = [(at, RankSaid(rank, PULSE, encode(sent))) for at in (1.0, 3.0) for rank in range(2)]
    figures = figures_of(course_of(*events, *trained()), 4.0, FOUND)
    assert line(figures)
    for each in figures.ranks:
        assert each.parts is None or min(each.parts) >= 0


def test_the_parts_of_a_step_are_all_of_it():
    assert Parts(1.0, 2.0, 3.0, 4.0).step_s == 10
