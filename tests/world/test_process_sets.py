"""Process sets: any ranks of the world, each set a small world of its own."""

import copy
import os
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import hvdlite as hvd
from hvdlite.world import world as worlds


def begin(process_sets=None):
    """A new world: no set of another case is left."""
    hvd.shutdown()
    hvd.init(process_sets=process_sets)


def member_lists(size):
    """Sets that overlap, with one member, with a gap, of all but one; none is the whole world."""
    wanted = [[0], [size - 1], list(range(size - 1)), list(range(1, size)), list(range(0, size, 2))]
    unique = []
    for ranks in wanted:
        if 0 < len(ranks) < size and ranks not in unique:
            unique.append(ranks)
    return unique


def rows(rank, count):
    """x[j] = rank² + 100 * j, so that no two sets of ranks have the same sum."""
    return torch.arange(count, dtype=torch.float64) * 100 + rank**2


def assert_collectives_run_in(process_set, ranks, tag):
    """Every kind of collective on a set; its result follows from the members' inputs."""
    own, size = hvd.rank(), len(ranks)
    at = ranks.index(own)
    total = sum(rows(r, 5) for r in ranks)
    kind = {"process_set": process_set}
    assert torch.equal(hvd.allreduce(rows(own, 5), op=hvd.Sum, **kind), total)
    assert torch.equal(
        hvd.allreduce(rows(own, 5), name=tag, op=hvd.Max, **kind), rows(ranks[-1], 5)
    )
    many = hvd.allreduce(torch.full((70_000,), own + 1.0), op=hvd.Sum, **kind)
    assert many.eq(sum(r + 1 for r in ranks)).all()
    gathered = hvd.allgather(rows(own, own + 1), **kind)
    assert torch.equal(gathered, torch.cat([rows(r, r + 1) for r in ranks]))
    for root in ranks:
        assert torch.equal(hvd.broadcast(rows(own, 5), root, **kind), rows(root, 5))
    sent = torch.tensor([1000 * own + other for other in ranks])
    received = hvd.alltoall(sent, **kind)
    assert received.tolist() == [1000 * other + own for other in ranks]
    scattered = hvd.reducescatter(rows(own, 2 * size), op=hvd.Sum, **kind)
    assert torch.equal(scattered, sum(rows(r, 2 * size) for r in ranks)[2 * at : 2 * at + 2])
    first, second = hvd.grouped_allreduce([rows(own, 3), rows(own, 1)], op=hvd.Sum, **kind)
    assert torch.equal(first, total[:3])
    assert torch.equal(second, total[:1])
    assert hvd.allgather_object({"rank": own}, **kind) == [{"rank": r} for r in ranks]
    assert hvd.broadcast_object(("from", own), ranks[-1], **kind) == ("from", ranks[-1])
    hvd.barrier(kind["process_set"])


def sets_from_both_ways(at_init):
    wanted = member_lists(int(os.environ["HVDLITE_TEST_SIZE"])) if at_init else None
    sets = [hvd.ProcessSet(ranks[::-1]) for ranks in wanted] if at_init else []
    begin(sets or None)
    own, size = hvd.rank(), hvd.size()
    if not at_init:
        wanted = member_lists(size)
        sets = [hvd.add_process_set(ranks) for ranks in wanted]
    assert [s.process_set_id for s in sets] == list(range(1, len(sets) + 1))
    for process_set, ranks in zip(sets, wanted, strict=True):
        assert process_set.ranks == ranks
        assert process_set.size() == len(ranks)
        assert process_set.included() is (own in ranks)
        assert process_set.rank() == (ranks.index(own) if own in ranks else None)
        comm = process_set.mpi_comm
        assert (comm is not None) is (own in ranks)
        if comm is not None:
            assert comm.allgather(own) == ranks
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.process_set_id == 0
    for again in range(2):
        for process_set, ranks in zip(sets, wanted, strict=True):
            if own in ranks:
                assert_collectives_run_in(process_set, ranks, f"named {again}")
        # Here only the members' own numbers count: the sets' unnamed operations have their own.
        assert_collectives_run_in(hvd.global_process_set, list(range(size)), f"named {again}")
    for process_set in sets[::-1]:
        assert hvd.remove_process_set(process_set) is True
        assert process_set.ranks is process_set.process_set_id is process_set.included() is None
        assert process_set.size() is process_set.rank() is process_set.mpi_comm is None
    assert hvd.remove_process_set(sets[0]) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1", "2,1", "2,2")
@pytest.mark.parametrize("at_init", [True, False])
def test_every_collective_runs_in_sets_made_at_init_and_later(world, at_init):
    world.run(sets_from_both_ways, at_init, knobs={"HVDLITE_TEST_SIZE": str(world.size)})


def several_threads():
    begin()
    own, size = hvd.rank(), hvd.size()
    wanted = member_lists(size)
    sets = [hvd.add_process_set(ranks) for ranks in wanted]
    begun = threading.Barrier(sum(own in ranks for ranks in wanted) + 1)
    failures = []

    def work(process_set, ranks):
        begun.wait()
        try:
            for i in range(30):
                x = torch.full((1 + 997 * (i % 5),), float(own + i))
                got = hvd.allreduce(x, op=hvd.Sum, process_set=process_set)
                assert got.eq(sum(r + i for r in ranks)).all()
                rows = hvd.allgather(torch.tensor([own, i]), process_set=process_set)
                assert rows.tolist() == [n for r in ranks for n in (r, i)]
        except BaseException as error:
            failures.append(f"{ranks}: {error!r}")

    threads = [
        threading.Thread(target=work, args=pair)
        for pair in zip(sets, wanted, strict=True)
        if own in pair[1]
    ]
    for thread in threads:
        thread.start()
    begun.wait()
    for i in range(30):
        assert (
            hvd.allreduce(torch.tensor([own + i]), op=hvd.Sum) == size * (size - 1) // 2 + size * i
        )
    for thread in threads:
        thread.join()
    for process_set in sets:
        hvd.remove_process_set(process_set)
    assert not failures, failures


@pytest.mark.ranks(3, 4)
@pytest.mark.hosts("2,1", "2,2")
def test_overlapping_sets_work_at_the_same_time_in_several_threads(world):
    world.run(several_threads)


def refused():
    begin([[0]])
    own, size = hvd.rank(), hvd.size()
    x = torch.ones(2)
    first = worlds.current().process_sets[1]
    unknown = hvd.ProcessSet([0, 1])
    for call in (
        lambda s: hvd.allreduce(x, process_set=s),
        lambda s: hvd.allreduce_async_(x, process_set=s),
        lambda s: hvd.grouped_allreduce([x], process_set=s),
        lambda s: hvd.allgather(x, process_set=s),
        lambda s: hvd.broadcast(x, 0, process_set=s),
        lambda s: hvd.alltoall(x, process_set=s),
        lambda s: hvd.reducescatter(x, process_set=s),
        lambda s: hvd.sparse_allreduce_async(x.to_sparse(), "s", hvd.Sum, process_set=s),
        lambda s: hvd.broadcast_object(x, process_set=s),
        lambda s: hvd.allgather_object(x, process_set=s),
        lambda s: hvd.broadcast_parameters([("x", x)], 0, process_set=s),
        hvd.barrier,
    ):
        with pytest.raises(ValueError, match=r"ProcessSet\(\[0, 1\]\) is not registered"):
            call(unknown)
        with pytest.raises(ValueError, match="expected a ProcessSet"):
            call([0])
        if own != 0:
            with pytest.raises(ValueError, match=f"rank {own} is not a member"):
                call(first)
    if own == 0:
        with pytest.raises(ValueError, match=r"root_rank=1, expected one of the members \[0\]"):
            hvd.broadcast(x, 1, process_set=first)
    for bad, text in (
        ([], "expected one or more ranks"),
        ([0, 0], "a rank appears twice"),
        ([0, True], "expected one or more ranks, counted from 0"),
        ([-1], "from 0"),
        ([0.5], "expected one or more ranks"),
        ("01", "expected a list of ranks"),
        (3, "expected a list of ranks"),
        ([0, size], f"has rank {size}, but the world has ranks 0 to {size - 1}"),
        (range(size), "global_process_set has the same members"),
        ([0], r"ProcessSet\(\[0\]\) has the same members and is already registered"),
        (first, "is already registered"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.add_process_set(bad)
    with pytest.raises(ValueError, match="expected a ProcessSet"):
        hvd.remove_process_set([0])
    assert hvd.remove_process_set(unknown) is False
    # None of it has changed anything.
    added = hvd.add_process_set(np.array([size - 1]))
    assert added.ranks == [size - 1]
    assert added.process_set_id == 2


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
def test_what_is_no_set_or_not_ours_is_a_value_error_on_every_rank(world):
    world.run(refused)


def raised(call):
    try:
        call()
    except (ValueError, hvd.HorovodInternalError) as error:
        return type(error).__name__, str(error)
    return None


def bad_on_one_rank():
    begin()
    own = hvd.rank()
    odd = own == 1
    found = [
        raised(lambda: hvd.add_process_set([0, 1, 1] if odd else [0, 1])),
        raised(lambda: hvd.add_process_set([1] if odd else [0])),
        raised(lambda: hvd.remove_process_set(7 if odd else hvd.ProcessSet([0]))),
    ]
    sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]
    found.append(raised(lambda: hvd.remove_process_set(sets[odd])))
    found.append(raised(lambda: hvd.add_process_set(sets[0] if odd else [0, 2])))
    assert [s.process_set_id for s in sets] == [1, 2]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
    hvd.shutdown()
    for wanted in ([[0], [1]] if odd else [[0]], 5 if odd else [[0]]):
        found.append(raised(lambda wanted=wanted: hvd.init(process_sets=wanted)))
        assert not hvd.is_initialized()
    return found


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
def test_a_set_that_is_bad_or_other_on_one_rank_is_an_error_on_every_rank(world):
    expected = [
        ("appears twice", "failed on rank 1: .*appears twice"),
        (r"rank 1 adds \[1\], rank 0 \[0\]", None),
        ("7 is int, expected a ProcessSet", "failed on rank 1: .*expected a ProcessSet"),
        ("rank 1 removes process set 2, rank 0 1", None),
        ("already registered", "failed on rank 1: .*already registered"),
        ("rank 1 passes 2 process sets, rank 0 1", None),
        ("process_sets=5, expected a list", "init failed on rank 1: .*process_sets=5"),
    ]
    everyones = world.run(bad_on_one_rank)
    for rank, found in enumerate(everyones):
        for (kind, text), (own, others) in zip(found, expected, strict=True):
            wanted = own if rank == 1 or others is None else others
            assert re.search(wanted, text), (rank, text, wanted)
            value_error = rank == 1 and others is not None
            assert kind == ("ValueError" if value_error else "HorovodInternalError")


def again_after_shutdown():
    kept = hvd.ProcessSet([0, 1])
    for _ in range(3):
        begin([kept])
        assert kept.ranks == [0, 1]
        more = hvd.add_process_set([1])
        if kept.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=kept) == 2
        if more.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=more) == 1
        hvd.shutdown()
        assert kept.ranks is None
        assert more.process_set_id is None
        with pytest.raises(ValueError, match=r"call hvdlite\.init"):
            hvd.allreduce(torch.ones(1), process_set=kept)


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1")
def test_sets_end_with_their_world_and_can_be_registered_in_the_next(world):
    world.run(again_after_shutdown)


def one_fails():
    begin()
    own, size = hvd.rank(), hvd.size()
    troubled, sound = hvd.add_process_set([0, 1]), hvd.add_process_set(range(1, size))
    x = torch.ones(50_000)
    handle = None
    if sound.included():
        handle = hvd.allreduce_async(x, name="x", op=hvd.Sum, process_set=sound)
    everyones = hvd.allreduce_async(x, name="x", op=hvd.Sum)
    text = None
    if troubled.included():
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(3 + own), name="x", op=hvd.Sum, process_set=troubled)
        text = str(caught.value)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=troubled) == 2
    if handle is not None:
        assert hvd.synchronize(handle).eq(size - 1).all()
    assert hvd.synchronize(everyones).eq(size).all()
    # Operations pending in a set that is removed fail, and no others.
    pending = None
    if own == 0:
        pending = hvd.allreduce_async(x, name="never", process_set=troubled)
    everyones = hvd.allreduce_async(x, name="y", op=hvd.Sum)
    hvd.remove_process_set(troubled)
    if pending is not None:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(pending)
    assert hvd.synchronize(everyones).eq(size).all()
    return text


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1", "2,1")
def test_what_fails_in_one_set_fails_there_alone(world):
    texts = [text for text in world.run(one_fails) if text]
    assert len(texts) == 2
    assert len(set(texts)) == 1
    assert "rank 1 " in texts[0]


def one_rank_leaves():
    begin([[0, 1], [1, 2]])
    without, with_it = (worlds.current().process_sets[i] for i in (1, 2))
    own = hvd.rank()
    hvd.barrier()
    failures = []
    if own == 2:
        hvd.shutdown()
    else:
        for process_set in (hvd.global_process_set, *([with_it] if own == 1 else [])):
            try:
                hvd.allreduce(torch.ones(1), process_set=process_set)
            except hvd.HorovodInternalError as error:
                failures.append("rank 2" in str(error))
        for i in range(20):
            total = hvd.allreduce(
                torch.full((i * 1000,), own + 1.0), op=hvd.Sum, process_set=without
            )
            assert total.eq(3).all()
        assert failures == [True] * (1 + own)
    hvd.shutdown()


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1", "1,1,1")
def test_a_set_without_the_rank_that_left_goes_on(world):
    world.run(one_rank_leaves)


def of_this_process():
    """Counts what a set could leave behind: threads, descriptors, maps of shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return (
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        sum("memfd:hvdlite" in line for line in maps.splitlines()),
    )


def highest_handle():
    """That of some new communicators. MPICH's are numbers, and those of freed ones are given out
    again; Open MPI's are addresses, and say nothing."""
    comms = [hvd.global_process_set.mpi_comm.Dup() for _ in range(8)]
    highest = max(worlds.current().mpi_runtime.handle(comm) for comm in comms)
    for comm in comms:
        comm.Free()
    return highest


def makes_and_removes(rounds):
    begin()

    def once():
        process_set = hvd.add_process_set([0, 1])
        if process_set.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=process_set) == 2
        assert hvd.remove_process_set(process_set)

    once()
    before, handle = of_this_process(), highest_handle()
    for _ in range(rounds):
        once()
    return before, of_this_process(), highest_handle() - handle


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1")
def test_removed_sets_leave_no_thread_no_descriptor_no_memory_and_no_communicator(world):
    for before, after, more_handles in world.run(makes_and_removes, 25):
        # Not of all rounds: a long wait opens a descriptor for each local rank, once.
        assert max(b - a for a, b in zip(before, after, strict=True)) < 8
        assert world.mpi != "mpich" or more_handles < 8


def from_communicators():
    begin()
    own, size = hvd.rank(), hvd.size()
    parent = hvd.global_process_set.mpi_comm
    # The even ranks and the odd ones, numbered backwards: members are sorted.
    comm = parent.Split(own % 2, -own)
    halves = hvd.add_process_set(hvd.ProcessSet(comm))
    ranks = list(range(own % 2, size, 2))
    assert halves.ranks == ranks
    assert halves.process_set_id == 1 + own % 2
    assert_collectives_run_in(halves, ranks, "half")
    with pytest.raises(ValueError, match="has the same members"):
        hvd.add_process_set(comm)
    comm.Free()
    assert hvd.add_process_set([0, 1]).process_set_id == 3
    for number in (1, 2):
        assert hvd.remove_process_set(worlds.current().process_sets[number])
    assert halves.ranks is None


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,2")
def test_sets_are_made_of_communicators_too_which_divide_the_world(world):
    world.run(from_communicators)


def copies():
    kept = hvd.ProcessSet([0, 1])
    begin([kept])
    module = torch.nn.Linear(1, 1)
    module.process_set = kept
    assert copy.deepcopy(module).process_set is kept
    assert copy.copy(kept) is kept
    assert pickle.loads(pickle.dumps(hvd.global_process_set)) is hvd.global_process_set
    other = pickle.loads(pickle.dumps(kept))
    assert other.ranks is None
    assert repr(other) == "ProcessSet([0, 1])"


@pytest.mark.ranks(3)
@pytest.mark.mpis("openmpi")
def test_a_copy_of_a_set_is_the_set(world):
    world.run(copies)


def a_world_of_one():
    hvd.shutdown()
    hvd.init(comm=[hvd_rank_of_mpi()])
    for bad in ([0], hvd.global_process_set):
        with pytest.raises(ValueError, match="registered"):
            hvd.add_process_set(bad)
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.global_process_set.ranks == [0]
    hvd.shutdown()


def hvd_rank_of_mpi():
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank()


@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
def test_a_world_of_one_has_the_global_set_alone(world):
    world.run(a_world_of_one)
