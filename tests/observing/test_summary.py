"""The summary of a job: its steps, and how much of a step was communication."""

import _thread
import re
import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from hvdlite.observe.summary import Summary
from hvdlite.observe.waits import Waits
from hvdrun.records import RECENT_S, TELLS_AT_LEAST_EVERY_S, Record, encode, parse, summary_of
from tests.harness.worlds import mpiexec_command, python_of


class Clock:
    """A clock, and the time that was waited."""

    def __init__(self):
        self.now = self.waited = self.cpu = 0.0
        self.cpu_of_all = None  # that of the process; None: half of the time

    def perf_counter(self):
        return self.now

    def thread_time(self):
        return self.cpu

    def process_time(self):
        return self.now / 2 if self.cpu_of_all is None else self.cpu_of_all

    def read(self):
        return self.waited

    read_of_step = read


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hvdlite.observe.summary.time", clock)
    return clock


def test_the_time_counts_from_the_end_of_the_first_step(clock):
    summary = Summary(clock, Clock())
    clock.now, clock.waited = 5.0, 4.0  # warming up
    for _ in range(3):
        summary.step_ended(1, "one", ())
        clock.now, clock.waited = clock.now + 1.0, clock.waited + 0.25
    assert summary.record()[:5] == (3, 2.0, 0.5, 0, 2.0 / 2)


def test_the_optimizer_with_most_steps_counts(clock):
    summary = Summary(clock, Clock())
    for i in range(6):
        clock.now += 1.0
        summary.step_ended(1, "one", ())
        if i % 2:
            summary.step_ended(2, "two", ())
    assert summary.record()[:5] == (6, 5.0, 0.0, 0, 5.0 / 2)


def steps(summary, clock, optimizer, count, seconds=0.1):
    for _ in range(count):
        clock.now += seconds
        summary.step_ended(optimizer, str(optimizer), (0, optimizer))


def test_after_a_warm_up_the_optimizer_counts_that_makes_the_steps_now(clock):
    summary = Summary(clock, Clock())
    steps(summary, clock, 1, 800)
    warm_up = summary.record()
    steps(summary, clock, 2, 3, 0.2)
    assert summary.latest()[:2] == (3, pytest.approx(0.2))  # at once
    steps(summary, clock, 2, 97, 0.2)
    progress = summary.progress()
    assert (progress["steps"], progress["optimizer"], progress["all_steps"]) == (100, 1, 900)
    assert summary.latest()[:2] == (100, pytest.approx(0.2))
    # Most of the time was the warm-up's.
    record = parse(encode(summary.record()))
    assert (record.optimizer, record.steps, record.members) == ("1", 800, warm_up.members)
    recent = record.recent
    assert (recent.optimizer, recent.steps) == ("2", 100)
    assert recent.members != warm_up.members
    assert recent.seconds == pytest.approx(99 * 0.2)
    assert recent.samples
    steps(summary, clock, 2, 900, 0.2)
    record = summary.record()
    assert (record.optimizer, record.steps, record.recent.optimizer) == ("2", 1000, "2")


def test_an_optimizer_with_a_step_now_and_then_does_not_count(clock):
    summary = Summary(clock, Clock())
    for _ in range(50):
        steps(summary, clock, 1, 1)
        steps(summary, clock, 2, 10)
    steps(summary, clock, 1, 1)
    assert summary.record().optimizer == "2"
    assert summary.progress()["optimizer"] == 1


def test_of_two_that_make_their_steps_in_turns_all_ranks_choose_the_same_one(clock):
    """At whatever moment each of them tells."""
    summary, chosen = Summary(clock, Clock()), set()
    for step in range(1000):
        for optimizer, seconds in ((1, 0.1), (2, 0.11)):
            steps(summary, clock, optimizer, 1, seconds)
            if step:
                chosen.add((summary.record().optimizer, summary.progress()["optimizer"]))
    assert chosen == {("1", 0)}


def test_without_steps_the_time_counts_from_init(clock):
    clock.now = 3.0
    summary = Summary(clock, Clock())
    clock.now, clock.waited = 13.0, 2.5
    assert summary.record()[:5] == (0, 10.0, 2.5, 0, 10.0 / 2)


def train(counted, clock, meanwhile):
    """The samples of steps of a second each, of which the thread that trains waits a quarter."""
    summary, samples = Summary(counted, Clock()), []
    for _ in range(4):
        meanwhile()
        counted.end(counted.begin() - 0.25)
        clock.now += 1.0
        summary.step_ended(1, "one", ())
        samples.append(summary.latest())
    return samples[1:], summary.record()


@pytest.fixture
def counted(clock, monkeypatch):
    monkeypatch.setattr("hvdlite.observe.waits.time", clock)
    return Waits()


def test_what_other_threads_of_the_script_wait_for_is_not_of_a_step(counted, clock):
    def log():
        thread = threading.Thread(target=lambda: counted.end(counted.begin() - 0.75))
        thread.start()
        thread.join()

    samples, record = train(counted, clock, log)
    assert [each.waited for each in samples] == [0.25] * 3
    assert (record.seconds, record.waited) == (3.0, 0.75)


@pytest.mark.parametrize(("waits_s", "waited"), [(0.5, 0.75), (2.0, 1.0)])
def test_what_autograds_threads_wait_for_is_of_a_step_up_to_all_of_it(
    counted, clock, waits_s, waited
):
    def backward():
        done = threading.Event()

        def run():
            counted.end(counted.begin() - waits_s)
            done.set()

        _thread.start_new_thread(run, ())  # not one that Python's threading knows
        assert done.wait(60)

    samples, record = train(counted, clock, backward)
    assert [each.waited for each in samples] == [waited] * 3
    assert (record.seconds, record.waited) == (3.0, 3 * waited)


class Operation:
    """Each question takes a 64th of a second and no CPU time."""

    def __init__(self, clock, *answers):
        self.clock, self.answers = clock, list(answers)
        clock.cpu_of_all = 0.0

    def poll(self):
        self.clock.now += 2**-6
        return self.answers.pop(0)


def passes(clock, seconds, cpu_s=0.0, others_s=0.0):
    clock.now, clock.cpu = clock.now + seconds, clock.cpu + cpu_s
    clock.cpu_of_all = (clock.cpu_of_all or 0.0) + cpu_s + others_s


@pytest.mark.parametrize(
    ("pause_s", "cpu_s", "others_s", "waits"),
    [
        (2**-20, 2**-20, 0.0, True),  # while not poll(handle): pass
        (2**-10, 2**-20, 0.0, True),  # while not poll(handle): time.sleep(0.001)
        (2**-10, 2**-20, 2**-12, True),  # and hvdlite moves its data
        (2**-10, 2**-10, 0.0, False),  # it computes a millisecond between two questions
        (2**-15, 2**-15, 0.0, False),  # or a few lines of Python
        (2**-10, 2**-20, 2**-10, False),  # it waits for a thread that computes for it
        (2**-4, 0.0, 0.0, False),  # it reads a file, and asks now and then
    ],
)
def test_a_thread_that_does_nothing_but_ask_for_the_end_waits(
    counted, clock, pause_s, cpu_s, others_s, waits
):
    operation = Operation(clock, False, False, True, True)
    for _ in range(4):
        counted.has_ended(operation)
        passes(clock, pause_s, cpu_s, others_s)
    # The last pause but one is after the end.
    expected = 4 * 2**-6 + (2 * pause_s if waits else 0.0)
    assert counted.read_own() == counted.read_of_step() == expected


@pytest.mark.parametrize("slow_is_last", [False, True])
def test_a_thread_that_asks_several_operations_waits_until_the_last_has_ended(
    counted, clock, slow_is_last
):
    both = [Operation(clock, False, False, False, True), Operation(clock, *[True] * 4)]
    for _ in range(4):
        for operation in reversed(both) if slow_is_last else both:
            counted.has_ended(operation)
        passes(clock, 2**-10)
    assert counted.read_own() == 8 * 2**-6 + 3 * 2**-10


def test_what_a_thread_does_after_it_has_waited_or_loaded_data_is_not_asking(counted, clock):
    operation = Operation(clock, False, False, False)
    counted.has_ended(operation)
    passes(clock, 2**-10)
    counted.end(counted.begin())
    passes(clock, 2**-10)
    counted.has_ended(operation)
    passes(clock, 2**-10)
    counted.forget_question()
    counted.has_ended(operation)
    assert counted.read_own() == 3 * 2**-6


def test_another_thread_may_make_the_next_step(counted, clock):
    summary = Summary(counted, Clock())
    for _ in range(6):
        counted.end(counted.begin() - 0.5)
        clock.now += 1.0
        thread = threading.Thread(target=summary.step_ended, args=(1, "one", ()))
        thread.start()
        thread.join()
        summary.step_ended(1, "one", ())
    record = parse(encode(summary.record()))
    assert 0 <= record.waited <= record.seconds
    assert all(0 <= each.waited <= each.seconds for each in record.samples)


@pytest.mark.parametrize(
    ("records", "num_proc", "text"),
    [
        (
            {0: Record(101, 5.0, 0.5)},
            1,
            "101 steps, 50.0 ms each; waiting and communication took 10 % of a step",
        ),
        (
            {0: Record(101, 20.0, 10), 1: Record(101, 20.1, 2.01), 2: Record(101, 20, 4)},
            3,
            (
                "101 steps, 201 ms each; waiting and communication took 10 % (rank 1) to 50 %"
                " (rank 0) of a step"
            ),
        ),
        (
            {1: Record(11, 1.0, 0.1), 2: Record(11, 1.0, 0.1)},
            4,
            (
                "11 steps (of 2 of 4 ranks), 100 ms each; waiting and communication took 10 % of"
                " a step"
            ),
        ),
        (
            {0: Record(0, 10.0, 1.0), 1: Record(0, 9.0, 1.5)},
            2,
            (
                "no step of DistributedOptimizer; waiting and communication took 1.0 s (rank 0)"
                " to 1.5 s (rank 1) of 10.0 s"
            ),
        ),
        (
            {0: Record(1, 10.0, 1.0)},
            1,
            "one step of DistributedOptimizer; waiting and communication took 1.0 s of 10.0 s",
        ),
        (
            {0: Record(0, 10.0, 1.0), 1: Record(2, 0.0, 0.0)},
            2,
            "2 steps, 0.0 ms each; waiting and communication took 0 % of a step",
        ),
    ],
)
def test_the_line(records, num_proc, text):
    assert summary_of(records, num_proc) == text


def test_hvdrun_is_told_now_and_then_while_there_is_a_world(clock, monkeypatch):
    told = []
    monkeypatch.setattr(
        "hvdlite.observe.summary.launcher_link.tell",
        lambda kind, data: told.append((clock.now, parse(data))),
    )
    monkeypatch.setattr("hvdlite.observe.summary.is_supervised", lambda: True)
    summary = Summary(clock, Clock())
    summary.place = 1, 3
    for _ in range(2001):
        summary.step_ended(1, "one", ())
        clock.now += 1.0
    times = [at for at, _ in told]
    assert times[:4] == [1.0, 6.0, 11.0, 16.0]
    assert max(b - a for a, b in pairwise(times)) == TELLS_AT_LEAST_EVERY_S
    a_thousand = next(index for index, at in enumerate(times) if at > 1000)
    assert times[a_thousand + 1] - times[a_thousand] == pytest.approx(10, abs=1)  # a hundredth
    assert told[0][1][:2] == (2, 1.0)
    assert {(record.rank, record.size) for _, record in told} == {(1, 3)}
    assert [record.recent is None for _, record in told] == [at < 61 for at in times]
    recent = told[-1][1].recent
    assert (recent.rank, recent.size, recent.optimizer) == (1, 3, "one")
    assert RECENT_S <= recent.seconds < RECENT_S + TELLS_AT_LEAST_EVERY_S
    summary.tell(1, 3)
    clock.now += 1000.0
    before = len(told)
    summary.step_ended(1, "one", ())
    assert len(told) == before


TRAINS = """
import torch, hvdlite as hvd
hvd.init()
model = torch.nn.Linear(4, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
{end}
"""
LINE = r"5 steps, \d+(\.\d)? ms each; waiting and communication took .* of a step"


@pytest.mark.parametrize(("mpi", "end"), [("openmpi", ""), ("mpich", "hvd.shutdown()")])
def test_hvdrun_shows_it_for_all_ranks(mpi, end):
    hvdrun = [str(python_of(mpi)), "-m", "hvdrun", "-np", "2", "--summary"]
    command = [*hvdrun, str(python_of(mpi)), "-c", TRAINS.format(end=end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    line, table, _, *rows, verdict = done.stderr.splitlines()[-6:]
    assert re.fullmatch(f"hvdrun: {LINE}", line)
    assert table == "hvdrun: where the time of a step goes, in ms:"
    assert [row.split()[:3] for row in rows] == [[str(rank), "localhost", "5"] for rank in (0, 1)]
    few = "4 steps that all ranks made can be compared, and 20 are needed"
    assert verdict == f"hvdrun: which rank is late is not known: {few}"
    assert done.stderr.count("5 steps") == 1


@pytest.mark.parametrize("end", ["", "hvd.shutdown(); hvd.init()"])
def test_without_hvdrun_rank_0_shows_its_own_once(end):
    mpi = "openmpi"
    command = ["env", "HVDLITE_SUMMARY=1", *mpiexec_command(mpi, 2), str(python_of(mpi)), "-c"]
    command.append(TRAINS.format(end=end))
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert len(re.findall(f"hvdlite: {LINE}", done.stderr)) == 1


def test_without_it_nothing_is_counted():
    program = "import hvdlite as hvd; from hvdlite.observe import waits; hvd.init();"
    program += "assert waits._counted is None and not waits.observed()"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
