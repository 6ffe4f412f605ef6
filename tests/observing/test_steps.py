"""What a rank keeps of its steps, and the time in which it waits for a DataLoader."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvdlite.observe import loading, waits
from hvdlite.observe.loading import Loading
from hvdlite.observe.steps import Reading, Steps
from hvdrun.for_hvdlite import MOST_RECENT, MOST_SAMPLES, RECENT_S, RECENT_STEPS
from hvdrun.records import FEWEST_STEPS


def steps_made(count):
    """Of `count` steps, the one with number s takes s seconds, of which s/2 waited and s/4 data."""
    made = Steps(Reading(0, 0, 0, 0), "one", (0, 1))
    now = 0
    for step in range(2, count + 1):
        now += step
        made.ended(Reading(now, now / 2, now / 4, 0))
    return made


def test_a_short_run_keeps_every_step_but_the_first():
    made = steps_made(MOST_SAMPLES + 1)
    assert [each.step for each in made.samples] == list(range(2, MOST_SAMPLES + 2))
    assert all(each[1:] == (each.step, each.step / 2, each.step / 4) for each in made.samples)


@settings(max_examples=20)
@given(st.integers(MOST_SAMPLES + 2, 9_000))
def test_a_long_run_keeps_some_of_all_parts_of_it(count):
    samples = steps_made(count).samples
    assert MOST_SAMPLES / 4 < len(samples) <= MOST_SAMPLES
    for part in range(8):
        begin, end = count * part // 8, count * (part + 1) // 8
        assert any(begin <= each.step <= end for each in samples)
    # Not those of one rhythm.
    assert {each.step % 5 for each in samples} == set(range(5))


@settings(max_examples=20)
@given(st.integers(2, 5000), st.integers(2, 5000))
def test_ranks_of_which_one_has_made_more_steps_have_samples_in_common(one, other):
    fewer, more = sorted((one, other))
    kept = {each.step for each in steps_made(fewer).samples}
    assert kept >= {each.step for each in steps_made(more).samples if each.step <= fewer}


# ---- the last minute

EVERY_S = 15.0


class Job:
    """One rank's steps, marked every 15 s."""

    def __init__(self, first_mark_s=0.0):
        self.now = self.cpu = 0.0
        self.made = Steps(Reading(0.0, 0.0, 0.0, 0.0), "one", (0, 1), {"cgroup": (0, 0, 0.0, 0.0)})
        self.mark_at = first_mark_s

    def step(self, seconds, cpu=0.5):
        self.now += seconds
        self.cpu += cpu * seconds
        self.made.ended(Reading(self.now, self.now / 4, self.now / 8, self.cpu))
        if self.now >= self.mark_at:
            self.made.mark(self.quotas)
            self.mark_at = self.now + EVERY_S

    @property
    def quotas(self):
        # Three processes like this one share the quota.
        return {"cgroup": (int(10 * self.now), int(self.cpu), 3 * self.cpu, self.now)}

    def recent(self):
        return self.made.record(self.quotas).recent


def test_a_young_job_has_no_last_minute():
    job = Job()
    for _ in range(int(RECENT_S)):
        job.step(1.0)
    assert job.recent() is None


def test_the_last_minute_is_told_apart():
    job = Job()
    for _ in range(3600):
        job.step(1.0)
    for _ in range(120):
        job.step(2.0, cpu=1.0)
    recent = job.recent()
    assert RECENT_S <= recent.seconds <= RECENT_S + 2 * EVERY_S
    made = recent.seconds / 2.0
    assert recent.steps == made + 1
    assert recent.waited == recent.seconds / 4
    assert recent.data == recent.seconds / 8
    assert recent.cpu == recent.seconds
    assert (recent.periods, recent.stopped) == (10 * recent.seconds, recent.seconds)
    assert recent.cores == 3.0
    assert [each.step for each in recent.samples] == list(range(3722 - int(made), 3722))
    assert {each.seconds for each in recent.samples} == {2.0}


def test_of_long_steps_there_are_enough():
    job = Job()
    for _ in range(2 * RECENT_STEPS + 10):
        job.step(40.0)
    recent = job.recent()
    assert recent.steps == RECENT_STEPS + 1
    assert len(recent.samples) == RECENT_STEPS


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.004, 0.03, 0.3, 3.0]), st.integers(300, 900)), max_size=5
    ),
    st.floats(0.0, EVERY_S),
    st.integers(0, 2000),
)
def test_ranks_have_enough_steps_of_the_last_minute_in_common(parts, first_mark_s, behind):
    """Whenever each of them tells, and though one has told earlier than the other."""
    one, other = Job(), Job(first_mark_s)
    steps = [seconds for seconds, count in parts for _ in range(count)] + [0.03] * 12_000
    told = None
    for index, seconds in enumerate(steps):
        one.step(seconds)
        other.step(seconds)
        if index == len(steps) - 1 - behind % int(EVERY_S / 0.03):
            told = other.recent()
    both = [{each.step for each in record.samples} for record in (one.recent(), told)]
    assert len(both[0] & both[1]) >= FEWEST_STEPS
    assert len(one.recent().samples) <= MOST_RECENT


def test_what_is_kept_of_an_optimizer_that_makes_no_more_steps_does_not_grow():
    job = Job()
    for _ in range(100):
        job.step(1.0)
    kept = len(job.made._marks)
    for _ in range(100):
        job.made.mark({})
    assert len(job.made._marks) <= kept + 1


# ---- DataLoaders


class Clock:
    """Time passes by what is loaded. `waited`: the part of it that was waited for hvdlite."""

    def __init__(self):
        self.now = self.waited = 0.0

    def perf_counter(self):
        return self.now

    def read_own(self):
        return self.waited

    def forget_question(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(loading, "time", clock)
    monkeypatch.setattr(loading, "_counted", None)
    base = torch.utils.data.dataloader._BaseDataLoaderIter
    monkeypatch.setattr(base, "__next__", base.__next__)  # to be put back
    return clock


class Slow(Dataset):
    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.clock.now += 2.0
        self.clock.waited += 0.5
        if index == 2 and self.clock.now > 100:
            raise OSError("the disk is gone")
        return float(index)


def test_the_time_in_a_loader_counts_without_what_it_waited_for_hvdlite(clock):
    counted = loading.count_time(clock)
    assert loading.count_time(clock) is counted  # and wraps nothing twice
    loaded = []
    for batch in DataLoader(Slow(clock), batch_size=1):
        clock.now += 10.0
        loaded += batch.tolist()
    assert loaded == [0.0, 1.0, 2.0]
    assert counted.read() == 3 * (2.0 - 0.5)


class OfALoader(IterableDataset):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        yield from self.inner


def test_a_loader_inside_another_counts_once(clock):
    counted = loading.count_time(clock)
    assert len(list(DataLoader(OfALoader(DataLoader(Slow(clock)))))) == 3
    assert counted.read() == 3 * (2.0 - 0.5)


def test_what_a_loader_raises_passes_through_and_counting_goes_on(clock):
    counted = loading.count_time(clock)
    clock.now = 100.0
    loader = iter(DataLoader(Slow(clock)))
    assert [next(loader), next(loader)] == [torch.tensor([0.0]), torch.tensor([1.0])]
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)
    assert counted.read() == 3 * (2.0 - 0.5)
    assert next(iter(DataLoader(Slow(clock)))) == 0.0
    assert counted.read() == 4 * (2.0 - 0.5)


def test_another_thread_that_loads_ahead_keeps_nobody_waiting(clock):
    counted = loading.count_time(clock)
    there = []
    thread = threading.Thread(
        target=lambda: (list(DataLoader(Slow(clock))), there.append(counted.read()))
    )
    thread.start()
    thread.join()
    assert (there, counted.read()) == ([4.5], 0.0)


def test_what_another_thread_waits_for_meanwhile_is_no_time_of_the_loader(clock, monkeypatch):
    monkeypatch.setattr(waits, "time", clock)
    counted = waits.Waits()

    class Busy(Slow):
        def __getitem__(self, index):
            waiting = threading.Thread(target=lambda: counted.end(counted.begin() - 50.0))
            waiting.start()
            waiting.join()
            clock.now += 2.0
            counted.end(counted.begin() - 0.5)
            return float(index)

    loaded = loading.count_time(counted)
    assert len(list(DataLoader(Busy(clock)))) == 3
    assert loaded.read() == 3 * (2.0 - 0.5)
    assert (counted.read(), counted.read_own()) == (3 * 50.5, 3 * 0.5)


def test_the_time_of_a_loader_between_two_questions_is_not_waiting(monkeypatch):
    class Ended:
        def poll(self):
            return False

    counted = waits.Waits()
    monkeypatch.setattr(loading, "_counted", None)
    base = torch.utils.data.dataloader._BaseDataLoaderIter
    monkeypatch.setattr(base, "__next__", base.__next__)  # to be put back
    loaded = loading.count_time(counted)

    class Naps(Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            time.sleep(0.01)
            return float(index)

    begin = time.perf_counter()
    for _ in DataLoader(Naps()):
        counted.has_ended(Ended())
    assert loaded.read() >= 20 * 0.01
    assert loaded.read() + counted.read_own() <= time.perf_counter() - begin


def test_it_looks_like_the_original():
    class Base:
        def __next__(self):
            "Of torch."

    wrapped = Loading(Clock()).counts(Base.__next__)
    assert (wrapped.__name__, wrapped.__doc__) == ("__next__", "Of torch.")
    assert wrapped.__wrapped__ is Base.__next__
