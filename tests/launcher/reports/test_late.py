"""Which ranks are late, by how much and why, from the times that each rank has waited."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdrun.records import FEWEST_STEPS, Record, Sample
from hvdrun.reports.late import Arrivals, arrivals_of, compare, report, so_far, verdicts

# Exactly representable, so that sums are exact: the time that data moves in each step.
MOVES_S = 1 / 512
BASE_S = 1 / 64


def job(computing, data=None, count=40, **fields):
    """The records of a job. computing, data: for rank and step (from 0), the seconds of it."""
    ranks = range(len(computing))
    samples = {rank: [] for rank in ranks}
    for step in range(count):
        loads = [data[rank](step) if data else 0.0 for rank in ranks]
        arrives = [computing[rank](step) + loads[rank] for rank in ranks]
        end = max(arrives) + MOVES_S
        for rank in ranks:
            samples[rank].append(Sample(step + 2, end, end - arrives[rank], loads[rank]))
    return {
        rank: Record(
            count + 1,
            sum(each.seconds for each in made),
            sum(each.waited for each in made),
            sum(each.data for each in made),
            0.5 * sum(each.seconds for each in made),
            optimizer="one",
            members=7,
            rank=rank,
            size=len(ranks),
            samples=tuple(made),
            **{name: value[rank] for name, value in fields.items()},
        )
        for rank, made in samples.items()
    }


def always(seconds):
    return lambda step: seconds


def host_of(rank):
    return f"server{rank // 2 + 1}"


delays = st.integers(1, 64).map(lambda n: n / 64)


@given(st.integers(2, 7), st.data(), delays)
def test_who_always_comes_last_is_named_with_the_delay(size, data, delay):
    late = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size // 2))
    in_data = data.draw(st.booleans())
    extra = [always(delay if rank in late else 0.0) for rank in range(size)]
    if in_data:
        records = job([always(BASE_S)] * size, extra)
    else:
        records = job([always(BASE_S + each(0)) for each in extra])
    found = arrivals_of(records)
    assert found.communication_s == MOVES_S
    assert found.late is not None
    assert found.late[:4] == (tuple(sorted(late)), 1.0, delay, "data" if in_data else "computing")
    if len(late) == 1:
        assert found.last == {
            rank: (1.0, delay, delay) if rank in late else (0.0, 0.0, 0.0) for rank in range(size)
        }


@given(st.integers(2, 7), delays)
def test_ranks_that_are_late_in_turns_are_not_named(size, delay):
    turns = [lambda step, rank=rank: BASE_S + delay * (step % size == rank) for rank in range(size)]
    found = arrivals_of(job(turns, count=6 * size + 20))
    assert found.late is None
    assert sum(each.share for each in found.last.values()) == 1.0


@given(st.integers(2, 7), st.integers(0, 1000))
def test_ranks_that_are_late_by_chance_are_not_named(size, seed):
    chance = random.Random(seed)
    steps = [[chance.random() / 8 for _ in range(100)] for _ in range(size)]
    assert arrivals_of(job([each.__getitem__ for each in steps], count=100)).late is None


@pytest.mark.parametrize(
    ("computing", "why"),
    [
        ([always(1 / 64), always(1 / 64)], "alike"),
        ([always(1.0), always(1.0 + 1 / 32)], "by less than a twentieth of a step"),
        ([always(1 / 4096), always(3 / 4096)], "by less than a millisecond"),
        ([always(0.5), lambda step: 0.5 + (step % 4 > 0)], "in 75 % of the steps"),
        ([always(0.5), lambda step: 0.5 + (step < 20)], "in the first half"),
        ([always(0.5), lambda step: 0.5 + (step > 15)], "not in most of the first half"),
        ([always(0.5), always(1.5), always(1.5)], "most are late"),
    ],
)
def test_it_is_not_enough_to_be_late(computing, why):
    assert arrivals_of(job(computing)).late is None, why


def test_too_few_steps_name_nobody():
    late = [always(0.5), always(1.5)]
    assert arrivals_of(job(late, count=FEWEST_STEPS - 1)).late is None
    assert arrivals_of(job(late, count=FEWEST_STEPS)).late is not None


def test_only_steps_that_all_ranks_have_made_are_compared():
    records = job([always(0.5), always(1.5), always(0.5)])
    joined = records[2]
    records[2] = joined._replace(samples=joined.samples[:25])
    found = arrivals_of(records)
    assert (found.steps, found.late.ranks) == (25, (1,))
    records[2] = joined._replace(samples=())
    assert arrivals_of(records) == Arrivals((0, 1, 2), 0, 0.0, {}, None)


def test_ranks_of_different_process_sets_are_not_compared():
    records = job([always(0.5), always(0.5), always(1.5), always(2.5)])
    for rank in (2, 3):
        records[rank] = records[rank]._replace(members=8)
    first, second = compare(records)
    assert (first.ranks, first.late.ranks) == ((2, 3), (3,))
    assert (second.ranks, second.late) == ((0, 1), None)


def test_the_late_ranks_of_each_process_set_are_told_up_to_three():
    delays = [0.5, 1.0, 0.25, 2.0, 0.75]
    computing = [each for delay in delays for each in (always(0.5), always(0.5 + delay))]
    sets = job(computing, **throttled(*[0, 0, 0, 0.5, 0, 0, 0, 0.5, 0, 0]))
    for rank in sets:
        # Of each pair on its own.
        samples = job(computing[rank // 2 * 2 : rank // 2 * 2 + 2])[rank % 2].samples
        sets[rank] = sets[rank]._replace(members=rank // 2, samples=samples)
    texts = verdicts(sets, compare(sets), lambda rank: "a")
    assert [text.split(": ")[0] for text in texts] == [
        "rank 7 on a arrives last in 100 % of steps, by 2000 ms",
        "rank 3 on a arrives last in 100 % of steps, by 1000 ms",
        "rank 9 on a arrives last in 100 % of steps, by 750 ms",
    ]
    assert sum("throttles it" in text for text in texts) == 2


def test_if_nobody_is_late_the_process_set_is_told_in_which_ranks_wait_most():
    computing = [lambda step: 0.5 + (step % 2), lambda step: 1.5 - (step % 2)]
    sets = {0: job([always(0.5)] * 2), 2: job(computing), 4: job(computing, count=19)}
    records = {
        first + rank: record._replace(rank=first + rank, size=6, members=first)
        for first, each in sets.items()
        for rank, record in each.items()
    }
    (text,) = verdicts(records, compare(records), host_of)
    assert text.startswith("no rank is steadily late: the others wait most for rank 3 on server2")


def test_ranks_of_different_worlds_are_not_compared():
    records = job([always(0.5), always(1.5)])
    assert compare(records)
    for changed in ({"size": 3}, {"rank": 0}):
        assert compare(records | {1: records[1]._replace(**changed)}) is None
    assert compare({rank: each._replace(size=0) for rank, each in records.items()}) is None
    text = report(records | {1: records[1]._replace(rank=0)}, host_of)[-1]
    assert text.startswith("hvdrun: which rank is late is not known: the ranks are not those of")


def throttled(*parts):
    return {"periods": [100.0] * len(parts), "stopped": [100.0 * part for part in parts]}


def test_the_cgroup_is_the_cause_only_if_the_others_are_not_throttled_alike():
    late = [always(0.5), always(0.5), always(1.5)]
    assert arrivals_of(job(late, **throttled(0, 0.1, 0.5))).late.cause == "throttled"
    assert arrivals_of(job(late, **throttled(0.4, 0.5, 0.5))).late.cause == "computing"
    assert arrivals_of(job(late, **throttled(0, 0, 0.2))).late.cause == "computing"


def test_a_cause_that_explains_less_than_half_of_the_delay_is_none():
    records = job([always(0.5), always(1.5)])
    # The rank did not compute, wait or load in most of its step: the clocks say nothing.
    samples = tuple(each._replace(seconds=0.75) for each in records[1].samples)
    late = arrivals_of(records | {1: records[1]._replace(samples=samples)}).late
    assert (late.ranks, late.cause) == ((1,), "unknown")


# ---- words

LOADS = job([always(BASE_S)] * 4, [always(0.0), always(0.0), always(0.0), always(0.25)])


TWO = [always(0.5)] * 2
BOTH = [*TWO, always(1.5), always(1.5)]
NOW_AND_THEN = [lambda step: 0.5 + (step % 3) / 64, lambda step: 0.515 + (step % 8 == 0)]
SAID = {
    "a DataLoader": LOADS,
    "two ranks compute longer": job(BOTH),
    "many ranks compute longer": job([always(0.5)] * 12 + [always(1.5)] * 10),
    "a cgroup throttles a rank": job([always(0.5), always(1.5)], **throttled(0, 0.8)),
    # A DataLoader's workers are paid from the same quota.
    "what the cgroup used": job([always(0.5), always(1.5)], **throttled(0, 0.8), cores=[0.0, 1.25]),
    "two in turns": job([lambda step: 0.5 + (step % 2), lambda step: 1.5 - (step % 2)]),
    "62.5 ms of 562.5": job([always(0.5), lambda step: 0.5 + (step % 4 == 0) / 4]),
    "late by much in half of the steps": job([always(0.5), lambda step: 0.25 + (step % 2)]),
    "late from a step on": job([always(0.5), lambda step: 0.5 + (step > 7)]),
    "stopped now and then": job(NOW_AND_THEN, **throttled(0, 0.8)),
    "one step": job([always(0.5), always(1.5)], count=1),
    "too few steps": job([always(0.5), always(1.5)], count=19),
    "throttled, and nobody is late": job(TWO, **throttled(0.3, 0.9)),
    "what cgroups used": job(TWO, **throttled(0.3, 0.9), cores=[1.0, 1.25]),
    "not one number of each kind": job(TWO, **throttled(0.3, 0.9), cores=[0.0, 1.25]),
}


def test_the_table_and_the_verdict(snapshot):
    assert arrivals_of(SAID["stopped now and then"]).late is None
    texts = [[f"=== {name}", *report(records, host_of)] for name, records in SAID.items()]
    snapshot("late", "\n".join(line for text in texts for line in [*text, ""]))


def test_of_many_ranks_the_table_has_those_that_are_last_most_often():
    late = [lambda step, rank=rank: BASE_S + (step % 20 == rank) for rank in range(40)]
    lines = report(job(late), host_of)
    rows = [line.split() for line in lines[2:-1]]
    assert [row[0] for row in rows[:-1]] == [str(rank) for rank in range(8)]
    assert rows[-1][:3] == ["others", "(32", "ranks)"]


def test_one_rank_alone_is_compared_with_nobody():
    _, _, row = report({0: LOADS[3]}, host_of)
    assert row.split() == ["0", "server1", "41", "267.6", "15.6", "250.0", "2.0", "-", "-", "-"]


def test_who_asks_while_the_job_runs_gets_the_line_the_table_and_the_verdict():
    line, head, *_, verdict = so_far(LOADS, 5, host_of).splitlines()
    assert line.startswith("41 steps (of 4 of 5 ranks), 268 ms each")
    assert head == "where the time of a step goes, in ms:"
    assert verdict.startswith("rank 3 on server2 arrives last in 100 % of steps")
    assert "--summary" in so_far({}, 5, host_of)


def test_the_last_minute_has_a_table_and_a_verdict_of_its_own():
    recent = job([always(BASE_S), always(0.25), always(BASE_S)])
    records = {
        rank: record._replace(recent=recent[rank])
        for rank, record in job([always(BASE_S)] * 3).items()
    }
    texts = so_far(records, 3, host_of).splitlines()
    whole, verdict = texts[1], texts[6]
    assert whole == "where the time of a step goes, in ms:"
    assert verdict.startswith("no rank is steadily late")
    head, _, row, *_, verdict = texts[7:]
    assert head == "the last 10 s: where the time of a step goes, in ms:"
    assert row.split()[:4] == ["0", "server1", "40", "252.0"]  # of 40 steps it has the times
    assert verdict.startswith("rank 1 on server1 arrives last in 100 % of steps, by 234 ms")
    assert not [line for line in report(records, host_of) if "the last" in line]


def test_figures_of_a_job_that_stands_still_are_not_told_as_if_they_were_of_now():
    recent = job([always(BASE_S)] * 3)
    records = {rank: each._replace(recent=each) for rank, each in recent.items()}
    texts = so_far(records, 3, host_of, 40.4).splitlines()
    assert texts[0] == "no rank has told of a step for 40 s; before that:"
    assert [line[:26] for line in texts if "the last" in line] == ["the last 1 s before that: "]


def test_without_steps_nothing_is_said():
    assert report({0: Record(0, 10.0, 1.0), 1: Record(1, 10.0, 1.0)}, host_of) == []


@settings(max_examples=30)
@given(st.lists(st.builds(Record, *[st.floats(0, 1e11)] * 7, size=st.just(2)), max_size=3))
def test_whatever_a_rank_sends_there_is_a_text(records):
    recent = [record._replace(recent=record) for record in records]
    assert so_far(dict(enumerate(recent)), 3, host_of)
