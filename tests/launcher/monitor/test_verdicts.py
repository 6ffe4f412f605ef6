"""The verdict of a job that runs."""

from hvdrun.monitor.figures import Verdicts, judge
from hvdrun.records import Record, Sample


def records(last, steps=40, **more):
    """Of three ranks, of which this one comes 50 ms after the others; communication takes 5 ms."""
    found = {}
    for rank in range(3):
        waited = 0.005 if rank == last else 0.055
        samples = tuple(Sample(step, 0.1, waited, 0.0) for step in range(2, steps + 1))
        numbers = (steps, 0.1 * (steps - 1), waited * (steps - 1))
        found[rank] = Record(*numbers, rank=rank, size=3, samples=samples, **more)
    return found


def test_it_names_the_rank_that_is_late_and_knows_what_communication_takes():
    found = judge(records(last=1), "abc".__getitem__)
    (text,) = found.texts
    assert text.startswith("rank 1 on b arrives last in 100 % of steps, by 50 ms")
    assert {rank: round(s, 6) for rank, s in found.communication_s.items()} == dict.fromkeys(
        range(3), 0.005
    )


def test_that_of_the_last_minute_counts_once_all_ranks_tell_of_it():
    recent = records(last=2)
    of_both = {
        rank: record._replace(recent=recent[rank]) for rank, record in records(last=1).items()
    }
    (text,) = judge(of_both, "abc".__getitem__).texts
    assert text.startswith("last 4 s: rank 2 on c arrives last")
    of_both[0] = of_both[0]._replace(recent=None)
    (text,) = judge(of_both, "abc".__getitem__).texts
    assert text.startswith("rank 1 on b arrives last")


def test_before_there_are_enough_steps_it_says_nothing():
    assert judge({}, str) == Verdicts()
    assert judge(records(last=1, steps=1), str) == Verdicts()
    assert judge(records(last=1, steps=15), str).texts == ()
