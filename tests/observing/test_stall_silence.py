"""Whichever rank or host hangs, those that wait for it report it, and end where they must."""

import ctypes
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from tests.observing.reports import DEADLINE_S, FAILS, WARNS, Said, end, host_of, start
from tests.observing.test_stall_shutdown import Flag, text_of

# Of so many names each host is the coordinator of some.
NAMES = [f"late {i}" for i in range(12)]


class Frozen:
    """A rank stops its process, and another one lets it go on. Made by all at the same place."""

    def __init__(self, rank):
        self._rank = rank
        self._pid = hvd.allgather_object(os.getpid())[rank]

    def stop_self(self):
        os.kill(self._pid, signal.SIGSTOP)

    def wait(self):
        deadline = time.monotonic() + DEADLINE_S
        while (state := Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2])[1] != "T":
            assert time.monotonic() < deadline, state
            time.sleep(0.02)

    def resume(self):
        os.kill(self._pid, signal.SIGCONT)


def one_host_is_frozen(frozen):
    hvd.init()
    rank, others = hvd.rank(), [r for r in range(hvd.size()) if r != frozen]
    process = Frozen(frozen)
    said = Said()
    handles = dict.fromkeys(NAMES)
    if rank == frozen:
        process.stop_self()
    else:
        process.wait()
        handles = {name: start(name) for name in NAMES}
        lines = said.wait_for_all(f"allreduce '{name}'" for name in NAMES)
        for line in lines:
            assert f" s for {host_of(frozen)}, which does not answer; called by rank" in line, line
            assert "; is that host cut off, or are its processes stopped? " in line, line
            link = rf"Or is the link between it and ({'|'.join(map(host_of, others))}) slow\?"
            assert re.search(f"{link}$", line), line
        # One line of the coordinator, or of each host that waits for it.
        assert len(lines) <= len(NAMES) * len(others)
    if rank == others[0]:
        process.resume()
    end(handles)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.hosts("1,1", "1,1,1")
@pytest.mark.wide_in("1,1,1")
def test_a_frozen_host_is_reported_whichever_is_the_coordinator(world, frozen):
    world.run(one_host_is_frozen, frozen, knobs=WARNS)


def a_host_is_frozen_until_the_second_report():
    hvd.init()
    rank, others = hvd.rank(), [r for r in range(hvd.size()) if r != 1]
    process = Frozen(1)
    said = Said()
    handle = None
    if rank == 1:
        process.stop_self()
    else:
        process.wait()
        handle = start("late")
        # Between two reports of one operation are 4 s.
        said.wait_for_line(r"hvdlite: allreduce 'late' still waits, after \d+ s, for .*")
    if rank == others[0]:
        process.resume()
    end({"late": handle})
    return said.lines(), host_of(1)


@pytest.mark.hosts("1,1,1")
@pytest.mark.wide_in("mpich")
def test_a_repeated_report_waits_for_the_answers_of_the_hosts_that_are_there(world):
    lines, host = world.run(a_host_is_frozen_until_the_second_report, knobs=WARNS)[0]
    again = [line for line in lines if " still waits, " in line]
    blames = rf"hvdlite: allreduce 'late' still waits, after \d+ s, for {host}, which does not "
    assert all(re.match(rf"{blames}answer; called by ranks 0, 2; ", x) for x in again), again


def a_host_is_frozen_before_a_run():
    hvd.init()
    process = Frozen(1)
    tensor = torch.ones(2000)
    place = tensor.data_ptr()
    plan = worlds.current().team.engine.plan(
        "p", _core.FLOAT32, _core.SUM, place, place, tensor.numel(), 1.0, 1.0, tensor
    )
    assert plan.start(tensor).wait() is None
    said = Said()
    if hvd.rank() == 1:
        process.stop_self()
    else:
        process.wait()
    begun = time.monotonic()
    run = plan.start(tensor)
    if hvd.rank() == 0:
        said.wait_for("allreduce 'p'")
        # The other check takes 3 s to begin, and 3 s to hear no answer.
        time.sleep(max(0.0, begun + 7.5 - time.monotonic()))
        process.resume()
    assert run.wait() is None
    hvd.barrier()
    return said.lines(), host_of(1)


@pytest.mark.hosts("1,1")
@pytest.mark.wide_in("mpich")
def test_a_run_that_a_frozen_host_may_not_have_begun_is_reported_as_late_and_nothing_else(world):
    """Hosts agree on no run of a plan: nobody can say that all ranks have called it."""
    (lines, host), _ = world.run(a_host_is_frozen_before_a_run, knobs=WARNS)
    # Each process says this once.
    lines = [line for line in lines if not line.startswith("hvdlite: no limit ends this wait")]
    waits = rf"(has waited \d+ s|still waits, after \d+ s,) for {host}, which does not answer; .*"
    expected = re.compile(rf"hvdlite: allreduce 'p' ({waits}|goes on after \d+ s)")
    assert all(expected.fullmatch(line) for line in lines), lines
    assert sum("goes on" in line for line in lines) <= 1, lines


def host_0_is_frozen():
    hvd.init()
    process = Frozen(0)
    failed = Flag()
    said = Said()
    text = None
    if hvd.rank() == 0:
        process.stop_self()
        text = text_of(start("next"))
    else:
        process.wait()
        if hvd.rank() == 1:
            text = text_of(start("late"))
            process.resume()
            failed.up()
        else:  # it waits for nothing, and hears of it
            failed.wait()
            text = text_of(start("other"))
    said.lines()
    hvd.shutdown()
    return text


@pytest.mark.hosts("1,1", "1,1,1")
@pytest.mark.wide_in("1,1,1")
def test_everything_fails_also_where_host_0_is_frozen(world):
    texts = world.run(host_0_is_frozen, knobs=FAILS)
    assert len(set(texts)) == 1, texts
    assert "allreduce 'late' has waited " in texts[0]
    assert ", which does not answer; called by rank 1; " in texts[0]


def a_leader_is_frozen():
    hvd.init()
    rank = hvd.rank()
    process = Frozen(0)
    said = Said()
    handles = dict.fromkeys(NAMES)
    if rank == 0:
        process.stop_self()
    else:
        process.wait()
        handles = {name: start(name) for name in NAMES}
        on_host_0 = f" s for rank 0 on {host_of(0)} (which "
        on_host_1 = f" s for {host_of(0)}, which does not answer; called by rank 2; "
        told = dict.fromkeys(NAMES, ())
        while not all(
            on_host_0 in str(lines) and on_host_1 in str(lines) for lines in told.values()
        ):
            told = {name: said.wait_for(f"allreduce '{name}'") for name in NAMES}
    if rank == 1:
        process.resume()
    end(handles)
    hvd.barrier()
    for name in NAMES:
        # Each host has spoken once.
        lines = [line for line in said.about(f"allreduce '{name}'") if " has waited " in line]
        assert len(lines) == 2, lines
        assert sum("; called by rank 1; " in line for line in lines) == 1, lines


@pytest.mark.hosts("2,1")
def test_a_rank_speaks_itself_where_the_one_that_speaks_for_its_host_is_frozen(world):
    world.run(a_leader_is_frozen, knobs=WARNS)


def a_rank_comes_while_another_host_is_asked():
    """Whether a rank of the host that asks came in time. A busy machine may hold it up."""
    hvd.init()
    rank, said = hvd.rank(), Said()
    for name in NAMES:
        process, came, heard, handle = Frozen(2), 0.0, 0.0, None
        hvd.barrier()
        if rank == 2:
            process.stop_self()
        else:
            process.wait()
        if rank == 1:
            time.sleep(1.6)  # the hosts are asked after a second, and have 1.5 s
            handle, came = start(name), time.monotonic()
        elif rank == 0:
            handle = start(name)
            line = said.wait_for(f"allreduce '{name}'")[0]
            heard = time.monotonic()
            process.resume()
        end({name: handle})
        if hvd.broadcast_object(came, root_rank=1) < hvd.broadcast_object(heard) - 0.5:
            if rank == 0:
                text = rf" s for {host_of(2)}, which does not answer; called by ranks 0, 1; "
                assert re.search(text, line), line
            return True
    return False


@pytest.mark.hosts("2,1")
@pytest.mark.wide_in("mpich")
def test_a_rank_that_has_come_since_the_hosts_were_asked_is_not_missing(world):
    assert all(world.run(a_rank_comes_while_another_host_is_asked, knobs=WARNS))


class Dam:
    """This process is held up at its next line on stderr, until the dam is opened."""

    def __init__(self):
        self._log = os.dup(2)
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        try:
            while os.write(write, b"\n" * 4096):
                pass
        except BlockingIOError:
            os.set_blocking(write, True)
        os.dup2(write, 2)
        os.close(write)

    def open(self):
        os.dup2(self._log, 2)
        threading.Thread(target=self._drain).start()

    def _drain(self):
        while os.read(self._read, 65536):
            pass


def the_speaker_is_held_up():
    hvd.init()
    rank = hvd.rank()
    said = Said()
    done = Flag()
    handle = None
    if rank == 0:
        dam = Dam()  # it posts first, is late first, and stops as it speaks
        handle = start("late")
        done.wait()
        dam.open()
    elif rank == 1:
        time.sleep(0.7)
        handle = start("late")
        said.wait_for_line(
            rf"hvdlite: allreduce 'late' still waits, after \d+ s, for rank 2 on {host_of(2)} "
            r"\(which .*; called by ranks 0, 1; .*"
        )
        done.up()
    else:
        done.wait()
    end({"late": handle})


@pytest.mark.ranks(3)
@pytest.mark.wide_in("mpich")
def test_another_rank_speaks_where_the_one_that_should_does_not_come_to_its_end(world):
    world.run(the_speaker_is_held_up, knobs=WARNS)


def the_shared_log_is_full(shuts_down):
    """Of one host: what is late can't be put into the shared log either."""
    hvd.init()
    last = hvd.size() - 1
    process = Frozen(last)
    said = Said()
    names = [f"n{i}" for i in range(150)]  # of 16 KiB each, which travel in the shared log's 1 MiB
    if hvd.rank() == last:
        process.stop_self()
    else:
        process.wait()
        handles = [hvd.allreduce_async(torch.ones(4000), name=name, op=hvd.Sum) for name in names]
        absent = f" s for rank {last} on {host_of(last)} (which "
        if shuts_down:
            text = text_of(handles[0])
            assert absent in text, text
        else:
            while not any(absent in line for line in said.lines()):
                time.sleep(0.05)
    if hvd.rank() == 0:
        process.resume()
    if shuts_down:
        hvd.shutdown()
        return
    if hvd.rank() == last:
        handles = [hvd.allreduce_async(torch.ones(4000), name=name, op=hvd.Sum) for name in names]
    for handle in handles:
        assert hvd.synchronize(handle).eq(hvd.size()).all()
    hvd.barrier()
    assert any(" goes on after " in line for line in said.lines())


@pytest.mark.parametrize("shuts_down", [False, True], ids=["reports", "shuts down"])
@pytest.mark.ranks(2)
@pytest.mark.wide_in("mpich")
def test_a_frozen_rank_is_reported_where_the_shared_log_is_full(world, shuts_down):
    world.run(the_shared_log_is_full, shuts_down, knobs=FAILS if shuts_down else WARNS)


def begin_an_entry():
    """As a rank that is stopped after it has reserved an entry and before it has written it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:hvdlite" in line:  # of worlds that have ended, too
            tail = ctypes.c_uint64.from_address(int(line.partition("-")[0], 16) + 128)
            tail.value += 64


def the_shared_log_has_a_gap(kind):
    hvd.init()
    process, failed = Frozen(1), Flag()
    engine = worlds.current().team.engine
    text = None
    if hvd.rank() == 2:  # of another host, where nobody waits: it hears of it
        failed.wait()
        text = text_of(start("next"))
    elif hvd.rank() == 1:
        begin_an_entry()
        process.stop_self()
        failed.wait()
    else:
        process.wait()
        if kind == "allreduce":
            text = text_of(start("late"))
        else:
            text = engine.recv(torch.zeros(3), 1, 4).wait()
        failed.up()
        process.resume()
    did = "not moved and has not run for " if kind == "allreduce" else "not called send "
    named = rf" s for rank 1 on {host_of(1)},? \(?which has {did}"
    hvd.shutdown()
    return text, named


@pytest.mark.parametrize("kind", ["allreduce", "recv"])
@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in("mpich")
def test_a_rank_that_stopped_as_it_wrote_to_the_shared_log_is_named_and_ends_the_wait(world, kind):
    for text, named in world.run(the_shared_log_has_a_gap, kind, knobs=FAILS)[::2]:
        assert re.search(named, text), text


def again_and_again():
    hvd.init()
    last = hvd.size() - 1
    said = Said()
    handles = {"late": start("late") if hvd.rank() < last else None}
    lines = said.wait_for("allreduce 'late'")
    while not (still := [line for line in said.lines() if "'late' still waits, after " in line]):
        time.sleep(0.1)
    assert f" s, for rank {last} on {host_of(last)} (which last finished " in still[0]
    end(handles)
    hvd.barrier()
    assert len(lines) == 1
    assert sum("allreduce 'late' goes on after " in line for line in said.lines()) == 1


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in("mpich")
def test_a_report_is_repeated_and_withdrawn(world):
    world.run(again_and_again, knobs=WARNS)
