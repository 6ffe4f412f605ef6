"""An operation that all ranks have posted and that does not move is reported, and ends after the
shutdown time."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.harness.mpi_sends import FIRST_DATA_TAG, TAG, send_through
from tests.observing.reports import (
    DEADLINE_S,
    FAILS,
    GIVES_UP,
    WARNS,
    Said,
    host_of,
    plain,
    works_again,
)

STOPPED = r"; all ranks have called it: is a process stopped, or a host cut off\?"


def begin(kind, elems):
    """An operation of some pieces, and the expected result."""
    size = hvd.size()
    tensor = torch.full((elems,), 1.0 + hvd.rank())
    each = torch.arange(1.0, size + 1)
    if kind == "allreduce":
        return hvd.allreduce_async(tensor, name="x", op=hvd.Sum), each.sum()
    if kind == "broadcast":
        return hvd.broadcast_async(tensor, size - 1, name="x"), each[-1]
    if kind == "allgather":
        return hvd.allgather_async(tensor, name="x"), each.repeat_interleave(elems)
    if kind == "alltoall":
        part = elems // size
        handle = hvd.alltoall_async(tensor[: part * size], name="x")
        return handle, each.repeat_interleave(part)
    return hvd.reducescatter_async(tensor, name="x", op=hvd.Sum), each.sum()


KINDS = [
    "allreduce",
    *(
        pytest.param(kind, marks=pytest.mark.wide)
        for kind in ("broadcast", "allgather", "alltoall", "reducescatter")
    ),
]
SMALL = {"HVDLITE_SEGMENT_BYTES": "4096"}
ELEMS = 100_000
# Where a leader stops under way: enough that the others give up before it is through with the rest.
MANY_ELEMS = 10_000_000
# A rank may be so much later than another; no standstill is shorter anyway.
FAILS_STANDING = {**FAILS, **SMALL, "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "3"}


class Frozen:
    """A rank that stops itself; rank 0 lets it go on. Made by all ranks at the same place."""

    def __init__(self, rank):
        world_folder = Path(os.environ["HVDLITE_TEST_FOLDER"])
        name = f"frozen-{os.urandom(8).hex()}"
        self._rank = rank
        self._folder = world_folder / hvd.broadcast_object(name, 0)
        self._folder.mkdir(exist_ok=True)
        flags = [self._folder / f"rank {other} has failed" for other in range(hvd.size())]
        self._own_flag = flags[hvd.rank()]
        self._others_flags = [flag for other, flag in enumerate(flags) if other != rank]
        self._pid = hvd.allgather_object(os.getpid())[rank]

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def _has_stopped(self):
        return psutil.Process(self._pid).status() == psutil.STATUS_STOPPED

    def wait(self):
        deadline = time.monotonic() + DEADLINE_S
        while not self._has_stopped():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def note_failed(self):
        self._own_flag.touch()

    def wait_until_others_failed(self):
        deadline = time.monotonic() + DEADLINE_S
        while missing := [flag.name for flag in self._others_flags if not flag.exists()]:
            assert time.monotonic() < deadline, f"all but: {missing}"
            time.sleep(0.01)

    def go_on(self):
        os.kill(self._pid, signal.SIGCONT)


class StoppingWire:
    """MPI's sends, before one of which this process stops. It is not in MPI then: one that stops
    while it puts a message into MPICH's shared memory keeps the others in MPI until it goes on."""

    def __init__(self, frozen):
        self._frozen = frozen
        self._left = 0  # data messages until it stops; 0: it does not

    def init(self):
        """What is sent from now on is sent through it, also after this case."""

        def isend(real, arguments):
            if self._left and arguments[TAG] >= FIRST_DATA_TAG:
                self._left -= 1
                if not self._left:
                    self._frozen.stop()
            return real(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            send_through(patch, isend)
            hvd.init()

    def stop_at(self, number):
        self._left = number


def begin_and_stop(kind, stopped, frozen):
    """One rank stops in an operation that all ranks have posted."""
    rank = hvd.rank()
    if leads_a_host(stopped):
        hvd.shutdown()
        wire = StoppingWire(frozen)
        wire.init()
        if rank == stopped:
            wire.stop_at(8)
        begun = begin(kind, MANY_ELEMS)
        if rank != stopped:
            frozen.wait()
        return begun
    if rank == stopped:
        begun = begin(kind, ELEMS)
    hvd.barrier()  # its posting is in the shared log, before those of the other ranks
    if rank == stopped:
        frozen.stop()
        return begun
    frozen.wait()
    return begin(kind, ELEMS)


def leads_a_host(rank):
    """Of several: the other hosts agree on nothing without it."""
    hosts = worlds.current().placement.hosts
    return len(hosts) > 1 and any(ranks[0] == rank for ranks in hosts)


def one_stops(kind, stopped):
    hvd.init()
    rank = hvd.rank()
    said, frozen = Said(), Frozen(stopped)
    handle, expected = begin_and_stop(kind, stopped, frozen)
    if rank == 0:
        lines = said.wait_for(f"{kind} 'x'")
        time.sleep(1.5)  # a second report would come by now
        lines = said.about(f"{kind} 'x'")
        frozen.go_on()
    found = hvd.synchronize(handle)
    assert (found[0] if kind == "alltoall" else found).eq(expected).all()
    if rank == 0:
        said.wait_for_line(rf"hvdlite: {kind} 'x' goes on after \d+ s")
    return lines if rank == 0 else [], host_of(stopped)


def pattern(kind, missing, end=STOPPED):
    return re.compile(
        rf"(hvdlite: )?{kind} 'x' has made no progress for \d+ s, after \d+ of \d+ pieces"
        rf"( and \d+ of \d+ messages of the next)?; "
        rf"it waits (within the host|between the hosts) for {missing}{end}"
    )


def missing(rank, host):
    has_not = r"has not [a-z ]+( and has not run for \d+ s)?"
    return rf"(rank {rank} on {host} \(which {has_not}\)|{host}, which does not answer)"


def may_name_several(world, kind):
    """Under MPICH a leader was seen not to answer while a rank of its host is stopped in an
    alltoall: then two hosts speak, and each names what it knows."""
    return kind == "alltoall" and world.mpi == "mpich" and world.hosts in ("2,2", "1,2")


@pytest.mark.parametrize("kind", ["allreduce"])  # the error below has the texts of all
@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,2", "1,1", "1,2")
@pytest.mark.wide_in(3, "1,1", "1,2", "mpich")
def test_an_operation_that_stands_still_is_reported_with_the_rank_that_is_missing(world, kind):
    stopped = world.size - 1
    ((lines, host), *_) = world.run(one_stops, kind, stopped, knobs={**WARNS, **SMALL})
    if may_name_several(world, kind):
        assert lines
        assert all(f"{kind} 'x' has made no progress for " in line for line in lines), lines
        return
    assert len(lines) == 1, lines
    assert pattern(kind, missing(stopped, host)).fullmatch(lines[0]), lines[0]


def one_stops_for_long():
    hvd.init()
    stopped = hvd.size() - 1
    said, frozen = Said(), Frozen(stopped)
    handle, expected = begin_and_stop("allreduce", stopped, frozen)
    if hvd.rank() == 0:
        said.wait_for("allreduce 'x'", 2)
        frozen.go_on()
    assert hvd.synchronize(handle).eq(expected).all()
    hvd.barrier()
    time.sleep(3)  # each rank looks four times a second, and withdraws what it has said
    return said.lines()


@pytest.mark.ranks(3)
@pytest.mark.wide_in("mpich")
def test_the_report_of_a_standstill_is_repeated_with_a_growing_pause_and_withdrawn_once(world):
    lines = world.run(one_stops_for_long, knobs={**WARNS, **SMALL})[0]
    # (One line more says how to set a limit.) Another rank may report the second time: lines stand
    # in the order of the ranks.
    about = [line for line in lines if "allreduce 'x'" in line]
    reports = [re.search(r" has made no progress for (\d+) s", line) for line in about]
    times = sorted(int(found[1]) for found in reports if found)
    assert len(times) == 2, lines
    assert times[1] >= times[0] + 4, times
    (withdrawn,) = (line for line, found in zip(about, reports, strict=True) if not found)
    assert re.fullmatch(r"hvdlite: allreduce 'x' goes on after \d+ s", withdrawn), withdrawn


def all_fail(kind, stopped):
    hvd.init()
    frozen = Frozen(stopped)
    handle, _ = begin_and_stop(kind, stopped, frozen)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(handle)
    frozen.note_failed()
    if hvd.rank() == (stopped == 0):
        frozen.wait_until_others_failed()
        frozen.go_on()
    host = host_of(stopped)
    works_again()
    return plain(str(caught.value)), host


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,2", "1,1", "1,2")
@pytest.mark.wide_in(3, "1,1", "1,2", "mpich")
def test_an_operation_that_stands_still_fails_on_every_rank_with_the_same_text(world, kind):
    stopped = world.size - 1
    results = world.run(all_fail, kind, stopped, knobs=FAILS_STANDING)
    texts = {text for text, _ in results}
    if may_name_several(world, kind):
        assert all(text.startswith(f"{kind} 'x' has made no progress for ") for text in texts)
        return
    assert len(texts) == 1, texts
    expected = pattern(kind, missing(stopped, results[0][1]), GIVES_UP)
    assert expected.fullmatch(texts.pop()), (expected.pattern, results)


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.hosts("1,1")
@pytest.mark.wide_in("mpich")
def test_a_host_that_stops_half_way_is_named_whichever_it_is(world, stopped):
    results = world.run(all_fail, "allreduce", stopped, knobs=FAILS_STANDING)
    text, host = results[1 - stopped]
    expected = pattern("allreduce", missing(stopped, host), GIVES_UP)
    assert expected.fullmatch(text), (expected.pattern, text)


@pytest.mark.hosts("2,2")
@pytest.mark.wide
def test_a_leader_that_stops_is_named_on_every_host(world):
    # Its host learns it by itself, as it can't ask the others; so the texts may differ.
    results = world.run(all_fail, "allreduce", 2, knobs=FAILS_STANDING)
    for text, host in results:
        expected = pattern("allreduce", missing(2, host), GIVES_UP)
        assert expected.fullmatch(text), (expected.pattern, text)
