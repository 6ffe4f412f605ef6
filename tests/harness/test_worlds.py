"""The harness itself: results and failures of a case on many ranks."""

import os
import signal
import threading

import pytest

from tests.harness import worlds
from tests.harness.worlds import Key, RanksFailed, World

pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.breaks_the_world,
    pytest.mark.wide_in("mpich"),
]


def rank_and_size():
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def raises_on_rank_1():
    if rank_and_size()[0] == 1:
        raise ValueError("only here")


def hangs_on_rank_2():
    if rank_and_size()[0] == 2:
        threading.Event().wait()


def dies_on_rank_0():
    if rank_and_size()[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def process_number():
    return os.getpid()


def knob():
    return os.environ.get("HVDLITE_TEST_KNOB")


def warns():
    import warnings

    warnings.warn("a warning", stacklevel=1)


def test_the_results_come_by_rank(world):
    assert world.run(rank_and_size) == [(0, 3), (1, 3), (2, 3)]


def test_the_ranks_stay_up_between_cases(world):
    assert world.run(process_number) == world.run(process_number)


def test_a_knob_lasts_for_its_case_only(world):
    assert world.run(knob, knobs={"HVDLITE_TEST_KNOB": "7"}) == ["7"] * 3
    assert world.run(knob) == [None] * 3


def test_an_exception_is_reported_with_its_rank_and_traceback_and_new_ranks_follow(world):
    before = world.run(process_number)
    with pytest.raises(RanksFailed, match=r"(?s)rank 1:.*raises_on_rank_1.*ValueError: only here"):
        world.run(raises_on_rank_1)
    assert not set(before) & set(world.run(process_number))


def test_what_all_ranks_raise_is_reported_once(world):
    with pytest.raises(RanksFailed, match="ranks 0, 1, 2:") as caught:
        world.run(warns)
    assert str(caught.value).count("UserWarning: a warning") == 1


def test_a_hanging_rank_is_named_and_its_stack_shown(world):
    with pytest.raises(RanksFailed, match=r"(?s)rank 2 had not ended.*in hangs_on_rank_2"):
        world.run(hangs_on_rank_2, limit_s=1)


def test_a_rank_that_dies_is_named(world):
    with pytest.raises(RanksFailed, match=r"rank.* 0.*:\nthe process died"):
        world.run(dies_on_rank_0)


@pytest.mark.mpis("openmpi")
def test_the_ranks_of_a_killed_world_are_gone(world):
    other = World(Key(world.mpi, 2))
    pids = other.run(process_number)
    other.kill()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


class Clock:
    """Each wait for a slice takes this long."""

    def __init__(self, slice_takes_s):
        self.now_s = 0.0
        self.slice_takes_s = slice_takes_s
        self.waits = 0

    def monotonic(self):
        return self.now_s

    def wait(self, connections, timeout):
        self.now_s += self.slice_takes_s
        self.waits += 1
        return []


@pytest.mark.parametrize(("slice_takes_s", "waits"), [(1.0, 5), (60.0, 5), (0.25, 20)])
def test_time_in_which_the_machine_stood_still_does_not_count(monkeypatch, slice_takes_s, waits):
    clock = Clock(slice_takes_s)
    monkeypatch.setattr(worlds, "time", clock)
    monkeypatch.setattr(worlds, "wait", clock.wait)
    assert worlds.Limit(5.0).wait([]) == []
    assert clock.waits == waits
