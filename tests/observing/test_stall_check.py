"""An operation that some ranks have not posted is reported once, and the report is true."""

import os
import re
import signal
import time

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.own_names import OwnName
from hvdlite.world import world as worlds
from tests.observing.reports import (
    BARRIER_ENDED,
    NO_LIMIT,
    UNEVEN,
    WARNS,
    Said,
    end,
    host_of,
    missing,
    posted,
    report,
    start,
)


def one_silent():
    hvd.init()
    last = hvd.size() - 1
    waits = hvd.rank() != last
    said = Said()
    handles = {"late": start("late") if waits else None}
    said.wait_for("allreduce 'late'")
    # A second report of the first one would come before the first report of the second.
    handles["later"] = start("later") if waits else None
    said.wait_for("allreduce 'later'")
    (line,) = said.about("allreduce 'late'")
    expected = report("allreduce 'late'", [missing(last, BARRIER_ENDED)], posted(*range(last)))
    assert expected.fullmatch(line), (expected.pattern, line)
    # After the first report of each process, which may have been in an earlier test.
    told = [line for line in said.lines() if NO_LIMIT in line]
    assert len(told) <= hvd.cross_size(), said.lines()
    assert said.ever(NO_LIMIT)
    end(handles)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.hosts("2,1", "1,1", "3,1")
@pytest.mark.wide_in(2, 4, "1,1", "3,1", "mpich")  # the check is the core's, above MPI
def test_an_operation_that_a_rank_has_not_posted_is_reported_once(world):
    world.run(one_silent, knobs=WARNS)


def one_silent_that_has_a_line():
    hvd.init()
    said = Said()
    tensor = torch.ones(3)
    posting = _core.posting(
        *(_core.ALLREDUCE, "0.7", True, _core.FLOAT32, tensor, tensor), site="train.py:12"
    )
    engine = worlds.current().team.engine
    operation = engine.post(posting) if hvd.rank() == 0 else None
    said.wait_for("allreduce '0.7' (train.py:12)")
    operation = operation or engine.post(posting)
    assert operation.wait() is None


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.wide_in("mpich")
def test_a_report_names_the_line_of_the_script_where_it_is_known(world):
    world.run(one_silent_that_has_a_line, knobs=WARNS)


def one_silent_of_three_hosts():
    hvd.init()
    said = Said()
    handles = {f"late {i}": start(f"late {i}") if hvd.rank() < 2 else None for i in range(6)}
    lines = said.wait_for_all(f"allreduce '{name}'" for name in handles)
    assert len(lines) == len(handles)
    for name, line in zip(sorted(handles), sorted(lines), strict=True):
        expected = report(f"allreduce '{name}'", [missing(2, BARRIER_ENDED)], "ranks (0, 1|1, 0)")
        assert expected.fullmatch(line), (expected.pattern, line)
    end(handles)


@pytest.mark.hosts("1,1,1")
@pytest.mark.wide_in("mpich")
def test_an_operation_for_which_two_hosts_wait_is_reported_once(world):
    world.run(one_silent_of_three_hosts, knobs=WARNS)


def all_but_one_silent():
    hvd.init()
    said = Said()
    handles = {"by one": start("by one") if hvd.rank() == 1 else None}
    (line,) = said.wait_for("allreduce 'by one'")
    words = [missing(rank, BARRIER_ENDED) for rank in (0, 2, 3)]
    # The hosts stand in the order of their answers.
    here, there = words[0], ", ".join(words[1:])
    expected = report("allreduce 'by one'", [f"({here}, {there}|{there}, {here})"], "rank 1")
    assert expected.fullmatch(line), (expected.pattern, line)
    end(handles)


@pytest.mark.ranks(4)
@pytest.mark.hosts("2,2")
@pytest.mark.wide
def test_all_missing_ranks_of_all_hosts_are_named(world):
    world.run(all_but_one_silent, knobs=WARNS)


def all_but_rank_1_wait():
    """Each operation has its own host that asks the others."""
    hvd.init()
    said, names = Said(), [f"late {n}" for n in range(8)]
    handles = {name: start(name) if hvd.rank() != 1 else None for name in names}
    for name in names:
        (line,) = said.wait_for(f"allreduce '{name}'")
        assert "; called by ranks 0, 2, 3; " in line, line
    hvd.barrier()
    end(handles)


@pytest.mark.ranks(4)
@pytest.mark.hosts("1,1,1,1")
def test_the_ranks_that_wait_stand_in_order(world):
    world.run(all_but_rank_1_wait, knobs=WARNS)


def two_hosts_wait_one_after_the_other():
    hvd.init()
    rank, said = hvd.rank(), Said()
    handle = None
    if rank != 2:
        time.sleep(0 if rank == 3 else 0.5)
        handle = start("in turn")
    said.wait_for_line(r"hvdlite: allreduce 'in turn' still waits, .*")
    end({"in turn": handle})
    hvd.barrier()
    return said.lines()


@pytest.mark.ranks(4)
@pytest.mark.hosts("2,2")
def test_hosts_that_began_to_wait_at_different_times_report_it_once(world):
    lines = world.run(two_hosts_wait_one_after_the_other, knobs=WARNS)[0]
    assert sum(" has waited " in line for line in lines) == 1, lines


def more_are_missing_than_have_room():
    hvd.init()
    said = Said()
    assert hvd.allreduce(torch.ones(1), name="n" * 120, op=hvd.Sum).item() == hvd.size()
    handles = {"late": start("late") if hvd.rank() == 0 else None}
    (line,) = said.wait_for("allreduce 'late'")
    assert line.count(" on ") == 2, line
    assert re.search(r"rank 1 on .*, rank 2 on .* and 2 more; called by rank 0; ", line), line
    end(handles)


@pytest.mark.hosts("3,2")
@pytest.mark.wide_in("mpich")
def test_missing_ranks_that_have_no_room_in_a_report_are_counted(world):
    world.run(more_are_missing_than_have_room, knobs=WARNS)


def each_in_another():
    hvd.init()
    own, ranks = hvd.rank(), range(hvd.size())
    said = Said()
    handles = {f"of {rank}": start(f"of {rank}") if rank == own else None for rank in ranks}
    for rank in ranks:
        (line,) = said.wait_for(f"allreduce 'of {rank}'")
        others = [
            missing(r, rf"has been in allreduce 'of {r}' for \d+ s") for r in ranks if r != rank
        ]
        for other in others:
            assert re.search(other, line), (other, line)
        assert line.count("(which ") == len(others)
        assert f"; called by rank {rank}; " in line
        assert line.endswith("; do all ranks take the same path through the program?")
    hvd.barrier()
    end(handles)


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1")
@pytest.mark.wide_in("mpich")
def test_the_report_says_what_the_missing_ranks_are_in(world):
    world.run(each_in_another, knobs=WARNS)


def after_a_failure():
    hvd.init()
    said = Said()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="unlike")
    handles = {"late": start("late") if hvd.rank() != 1 else None}
    (line,) = said.wait_for("allreduce 'late'")
    failed = missing(1, r"last failed in allreduce 'unlike' \d+ s ago")
    assert report("allreduce 'late'", [failed], posted(0, 2)).fullmatch(line), line
    end(handles)


@pytest.mark.ranks(3)
@pytest.mark.wide_in("mpich")
def test_the_report_says_what_a_missing_rank_failed_in(world):
    world.run(after_a_failure, knobs=WARNS)


def one_after_the_other():
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    said = Said()
    handles = dict.fromkeys("abc")
    if rank == last:
        handles["a"] = start("a")
    said.wait_for("allreduce 'a'")
    # The other one posts it only now.
    if rank:
        handles["a"] = handles["a"] or start("a")
        handles["b"] = start("b")
    said.wait_for("allreduce 'b'")
    if rank:
        handles["c"] = start("c")
    said.wait_for("allreduce 'c'")
    assert [len(said.about(f"allreduce '{name}'")) for name in handles] == [1, 1, 1]
    end(handles)


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1", "1,2", "1,1,1")
@pytest.mark.wide
def test_a_rank_that_posts_after_the_report_causes_no_second_one(world):
    world.run(one_after_the_other, knobs=WARNS)


def again_later():
    hvd.init()
    said = Said()
    for count in (1, 2):
        handles = {"same": None if hvd.rank() else start("same")}
        said.wait_for("allreduce 'same'", count)
        end(handles)
        hvd.barrier()
    assert len(said.about("allreduce 'same'")) == 2


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,2")
@pytest.mark.wide_in(3, "mpich")
def test_the_next_operation_of_the_same_name_is_reported_too(world):
    world.run(again_later, knobs=WARNS)


def thousands():
    hvd.init()
    last = hvd.size() - 1
    names = [f"n{i}" for i in range(1500)]
    said = Said()
    handles = {name: None if hvd.rank() == last else start(name) for name in names}
    lines = said.wait_for_all(f"allreduce '{name}'" for name in names)
    end(handles)
    assert len(lines) == len(names)
    for line in lines:
        assert re.search(rf" s for {missing(last, BARRIER_ENDED)}; called by ", line), line


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1", "2,1")
@pytest.mark.wide_in(3, "2,1")
@pytest.mark.mpis("openmpi")  # under MPICH it takes half a minute where two ranks share a core
def test_thousands_that_are_late_at_once_are_reported_once_each(world):
    world.run(thousands, knobs=WARNS)


NAMES = ['it\'s "quoted" \\', "two\nlines\tand a tab\x1b[31m", "x" * 200, "ü" * 200, "%s%n %d"]
# Control characters would break the line, or the terminal; 127 bytes of a name are shown.
SHOWN = [NAMES[0], "two?lines?and a tab?[31m", "x" * 124 + "...", "ü" * 62 + "...", NAMES[4]]


def odd_names():
    hvd.init()
    last = hvd.size() - 1
    waits = hvd.rank() < last
    said = Said()
    handles = {name: start(name) if waits else None for name in NAMES}
    lines = said.wait_for_all(f"allreduce '{name}'" for name in SHOWN)
    end(handles)
    assert len(lines) == len(NAMES)
    for name in SHOWN:
        by = "ranks (0, 1|1, 0)"
        expected = report(f"allreduce '{name}'", [missing(last, BARRIER_ENDED)], by)
        assert any(expected.fullmatch(line) for line in lines), (expected.pattern, lines)
    # The name of the operation that a missing rank waits in is shown alike, a little shorter.
    handles = {NAMES[1]: None if waits else start(NAMES[1])}
    handles["other"] = start("other") if waits else None
    (line,) = said.wait_for("allreduce 'other'")
    assert f"(which has been in allreduce '{SHOWN[1]}' for " in line
    hvd.barrier()
    end(handles)


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1")
@pytest.mark.wide_in(3, "mpich")
def test_a_report_is_one_line_whatever_the_name(world):
    world.run(odd_names, knobs=WARNS)


def on_a_process_set():
    hvd.init()
    members = [0, 2]
    process_set = hvd.add_process_set(members)
    said = Said()

    def begin():
        return hvd.broadcast_async(torch.ones(1), 2, name="b", process_set=process_set)

    handle = begin() if hvd.rank() == 0 else None
    (line,) = said.wait_for("broadcast 'b'")
    nothing = missing(2, "has called no collective yet")
    assert report("broadcast 'b'", [nothing], "rank 0").fullmatch(line), line
    if hvd.rank() in members:
        hvd.synchronize(handle or begin())
    hvd.remove_process_set(process_set)


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in("mpich")
def test_ranks_of_a_process_set_are_named_by_their_numbers_in_the_world(world):
    world.run(on_a_process_set, knobs=WARNS)


def with_one_that_joined():
    hvd.init()
    said = Said()
    last = hvd.size() - 1
    if hvd.rank() == 0:
        hvd.join()
        return
    # (A name of its own: one that has ended before would be asked about batches.)
    handle = start("beside join") if hvd.rank() < last else None
    (line,) = said.wait_for("allreduce 'beside join'")
    by = posted(*range(1, last))
    assert report("allreduce 'beside join'", [missing(last, BARRIER_ENDED)], by).fullmatch(line), (
        line
    )
    # Rank 0 adds zeros.
    assert hvd.synchronize(handle or start("beside join")).eq(hvd.size() - 1).all()
    hvd.join()
    assert not said.about("join 'join'")


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1", "1,1,1", "1,2")
@pytest.mark.wide_in("mpich", "1,1,1", "1,2")
def test_a_rank_that_has_joined_is_not_missing(world):
    world.run(with_one_that_joined, knobs=WARNS)


def make_plan(name, tensor):
    where, count = tensor.data_ptr(), tensor.numel()
    engine = worlds.current().team.engine
    return engine.plan(name, _core.FLOAT32, _core.SUM, where, where, count, 1.0, 1.0, tensor)


def a_plans_run():
    hvd.init()
    last = hvd.size() - 1
    tensor = torch.ones(2000)
    plan = make_plan("p", tensor)
    for count in (0, 1):
        assert plan.start(tensor).wait() is None
        said = Said()
        run = plan.start(tensor) if hvd.rank() < last else None
        (line,) = said.wait_for("allreduce 'p'")
        waits = [missing(last, BARRIER_ENDED)], posted(*range(last))
        expected = report("allreduce 'p'", *waits, f"; {UNEVEN}")
        assert expected.fullmatch(line), (count, expected.pattern, line)
        assert (run or plan.start(tensor)).wait() is None
        hvd.barrier()


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
@pytest.mark.wide
def test_a_run_of_a_plan_is_reported_with_what_makes_ranks_miss_a_backward(world):
    world.run(a_plans_run, knobs=WARNS)


def a_plan_and_its_run():
    hvd.init()
    last = hvd.size() - 1
    tensor = torch.ones(2000)
    said = Said()
    plan = make_plan("p", tensor) if hvd.rank() < last else None
    run = plan and plan.start(tensor)
    said.wait_for("plan 'p'")
    # The plan is made now; the run that has waited for it all the time still lacks a rank.
    plan = plan or make_plan("p", tensor)
    said.wait_for("allreduce 'p'")
    assert (run or plan.start(tensor)).wait() is None


@pytest.mark.hosts("2,1")
@pytest.mark.wide
def test_a_run_that_was_posted_before_its_plan_was_made_is_reported_too(world):
    world.run(a_plan_and_its_run, knobs=WARNS)


def late_twice_for_a_joined_host():
    """The coordinator of an operation may have joined; then it has not posted it itself."""
    hvd.init()
    said = Said()
    names = [f"twice {i}" for i in range(6)]
    if hvd.rank() < 2:
        for _ in range(2):
            if hvd.rank() == 1:
                time.sleep(2.5)
            for handle in [start(name) for name in names]:
                hvd.synchronize(handle)
            hvd.barrier()
    hvd.join()
    return [line.split("'")[1] for line in said.lines() if " has waited " in line]


@pytest.mark.hosts("1,1,1")
@pytest.mark.wide
def test_a_name_is_reported_again_where_its_coordinator_has_joined(world):
    told = world.run(late_twice_for_a_joined_host, knobs=WARNS)[0]
    assert sorted(told) == sorted(2 * [f"twice {i}" for i in range(6)])


def large_and_slow():
    hvd.init()
    said = Said()
    count, longest_s = 10_000, 0.0
    while longest_s < 4.0:
        count *= 3
        tensor = torch.ones(count)
        hvd.barrier()
        begin = time.monotonic()
        hvd.broadcast_(tensor, 0, name=f"slow {count}")
        longest_s = hvd.allreduce(torch.tensor(time.monotonic() - begin), op=hvd.Max).item()
    assert not said.lines()


@pytest.mark.wide  # it takes some seconds
@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
def test_what_is_slow_but_posted_by_all_is_not_reported(world):
    small = {"HVDLITE_BLOCK_BYTES": "256", "HVDLITE_SEGMENT_BYTES": "64"}
    world.run(large_and_slow, knobs={**WARNS, **small, "HVDLITE_PIECE_BYTES": "1024"})


def kept_late():
    """An operation is later than the limit, and there is no report."""
    hvd.init()
    said = Said()
    handles = {"late": None if hvd.rank() else start("late")}
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        time.sleep(0.1)
    end(handles)
    hvd.barrier()
    assert not said.about("allreduce 'late'")


@pytest.mark.parametrize(
    "knobs",
    [
        {**WARNS, "HVDLITE_STALL_CHECK_DISABLE": "1", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1"},
        pytest.param({"HVDLITE_STALL_CHECK_TIME_SECONDS": "0"}, marks=pytest.mark.wide),
    ],
    ids=["disabled", "never"],
)
@pytest.mark.ranks(3)
@pytest.mark.wide_in("mpich")
def test_nothing_is_reported_where_the_check_is_off(world, knobs):
    world.run(kept_late, knobs=knobs)


def a_frozen_host():
    hvd.init()
    rank = hvd.rank()
    pids = hvd.allgather_object(os.getpid())
    said = Said()
    handles = {f"late {i}": start(f"late {i}") if rank < 2 else None for i in range(20)}
    if rank == 2:
        # Its process stops here; rank 0 lets it go on.
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        # Those that its leader would have to ask about stay unreported.
        deadline = time.monotonic() + 40
        while not (lines := [line for line in said.lines() if " has waited " in line]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    if rank == 0:
        os.kill(pids[2], signal.SIGCONT)
        for line in lines:
            # Host 2 would ask the others for some of them: of these a host knows its own ranks.
            assert f" s for {host_of(2)}, which does not answer; called by rank" in line, line
    end(handles)


@pytest.mark.wide  # it takes some seconds
@pytest.mark.hosts("1,1,1")
def test_a_host_that_does_not_answer_is_named(world):
    world.run(a_frozen_host, knobs=WARNS)


def operations_without_a_name_of_the_users():
    hvd.init()
    last, tensor = hvd.size() - 1, torch.ones(2)
    said, rank = Said(), hvd.rank()
    number = worlds.current().team.next_unnamed().removeprefix("unnamed.")
    # Each is posted by all but the last rank, and called in the report by what the user knows.
    calls = {
        f"an unnamed broadcast (no. {number})": lambda: hvd.broadcast_async(tensor, 0),
        "the broadcast in load_state_dict": lambda: hvd.broadcast_async(
            tensor, 0, name="hvdlite.load_state_dict.end"
        ),
        "the check of the parameters": lambda: hvd.allreduce_async(
            tensor, name=OwnName("x.consistency", "the check of the parameters")
        ),
    }
    handles = [None if rank == last else call() for call in calls.values()]
    for called in calls:
        (line,) = said.wait_for(called)
        assert report(called, [missing(last, BARRIER_ENDED)], posted(*range(last))).fullmatch(line)
    for handle, call in zip(handles, calls.values(), strict=True):
        hvd.synchronize(handle or call())


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_a_report_calls_hvdlites_own_operations_by_what_they_do(world):
    world.run(operations_without_a_name_of_the_users, knobs=WARNS)


def one_batch_more(name):
    """On all but the last rank; meanwhile that computes, waits in an operation of its own, or has
    left."""
    hvd.init()
    last, tensor = hvd.size() - 1, torch.ones(3)
    said, rank = Said(), hvd.rank()
    # The first one may be late for any reason; it is not the batches.
    first = start("first") if rank < last else None
    (line,) = said.wait_for("allreduce 'first'")
    waits = [missing(last, BARRIER_ENDED)], posted(*range(last))
    assert report("allreduce 'first'", *waits).fullmatch(line), line
    hvd.synchronize(first or start("first"))
    for _ in range(2):
        hvd.allreduce(tensor, name=name)
    called = "allreduce 'loss'"
    if name is None:
        number = worlds.current().team.next_unnamed().removeprefix("unnamed.")
        called = f"an unnamed allreduce (no. {number})"
    handle = hvd.allreduce_async(tensor, name=name) if rank < last else None
    (line,) = said.wait_for(called)
    assert re.search(f" last finished .*; {UNEVEN}$", line), line
    hvd.synchronize(handle or hvd.allreduce_async(tensor, name=name))
    # The error of a rank that waits for one that has left.
    hvd.barrier()
    if rank < last:
        with pytest.raises(hvd.HorovodInternalError, match=f"has left .*; {UNEVEN}"):
            hvd.allreduce(tensor, name=name)
    hvd.shutdown()


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("name", ["loss", None])
def test_a_metric_of_one_more_batch_is_reported_as_uneven_data(world, name):
    world.run(one_batch_more, name, knobs=WARNS)
