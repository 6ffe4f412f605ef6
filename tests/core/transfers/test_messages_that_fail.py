"""Sends and receives that fail, are withdrawn, wait too long, or lose the rank they wait for."""

import os
import random
import re
import signal
import struct
import threading
import time

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from tests.core.engines import make_engine
from tests.core.matching.test_joined import everyone
from tests.core.messages import HOSTS, done, engine, pattern


def different_sizes(sent_bytes, received_bytes):
    hvd.init()
    text = None
    if hvd.rank() == 0:
        text = engine().send(torch.zeros(sent_bytes, dtype=torch.uint8), 1, 3).wait()
    elif hvd.rank() == 1:
        text = engine().recv(torch.zeros(received_bytes, dtype=torch.uint8), -1, 3).wait()
    hvd.allreduce(torch.ones(10), name="goes on")
    return text


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize(("sent", "received"), [(5, 4), (4, 5), (0, 1), (100_000, 99_999)])
def test_sizes_that_differ_fail_both_sides_with_one_text(world, sent, received):
    texts = world.run(different_sizes, sent, received)
    assert texts[0] == texts[1]
    assert "send from rank 0 on " in texts[0]
    assert " to rank 1 on " in texts[0]
    assert (
        f"with tag 3: the sender's tensor has {sent} bytes, the receiver's {received}" in texts[0]
    )


def withdrawals():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    peer = rank ^ 1
    if peer >= size:
        hvd.barrier()
        hvd.barrier()
        return
    x, y = torch.ones(5000), torch.zeros(5000)
    waits = engine().recv(y, peer, 2)
    assert waits.withdraw()
    assert waits.withdraw()
    assert waits.wait() == f"recv from rank {peer} with tag 2 was withdrawn"
    own = engine().send(x, rank, 7)
    assert own.withdraw()
    assert own.wait() == f"send to rank {rank} with tag 7 was withdrawn"
    # Both know each other between hosts, too.
    done(engine().send(x, peer, 1), engine().recv(y, peer, 1))
    hvd.barrier()
    for elems in (2, 5000):
        sent = engine().send(x[:elems], peer, 3)
        assert sent.withdraw()
        assert sent.wait() == f"send to rank {peer} with tag 3 was withdrawn"
    hvd.barrier()
    # What was withdrawn is not received by what comes after it.
    y.zero_()
    into = engine().recv(y[:3], peer, 3)
    done(engine().send(torch.full((3,), 9.0), peer, 3), into)
    assert y[:3].eq(9).all()
    assert not into.withdraw()


@pytest.mark.ranks(1, 2)
@pytest.mark.hosts("1,1")
def test_what_is_withdrawn_before_it_is_matched_never_is(world):
    world.run(withdrawals)


def races_a_withdrawal(rounds):
    """Whatever withdraw says is what happened to the other side."""
    hvd.init()
    rank = hvd.rank()
    for i in range(rounds):
        if rank == 0:
            sent = engine().send(torch.ones(3 if i % 2 else 3000), 1, 1)
            time.sleep(random.random() * 1e-4)
            withdrawn = sent.withdraw()
            assert (sent.wait() is None) is not withdrawn
            done(engine().send(torch.tensor([int(not withdrawn)]), 1, 2))
        elif rank == 1:
            into = engine().recv(torch.zeros(3 if i % 2 else 3000), 0, 1)
            told = torch.zeros(1, dtype=torch.int64)
            done(engine().recv(told, 0, 2))
            if told.item():
                done(into)
            else:
                assert into.withdraw()


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_a_withdrawal_and_a_match_agree(world):
    world.run(races_a_withdrawal, 100)


def waits_with_a_limit(bytes_):
    """Rank 1 calls none of what rank 0 waits for, until rank 0 has given up waiting."""
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    x = torch.ones(bytes_, dtype=torch.uint8)
    texts, operations = [], []
    if rank == 0:
        operations = [
            engine().send(x, last, 3, "a.py:7"),
            engine().recv(x.clone(), last, 4),
            engine().recv(x.clone(), -1, 5),
        ]
        for operation in operations:
            with pytest.raises(TimeoutError) as caught:
                operation.wait(timeout_s=0.05)
            texts.append(str(caught.value))
            assert not operation.poll()
    everyone().Barrier()
    if rank == last:
        operations += [
            engine().recv(x.clone(), 0, 3),
            engine().send(x, 0, 4),
            engine().send(x, 0, 5),
        ]
    for operation in operations:
        assert operation.wait(timeout_s=600.0) is None
        assert operation.wait(timeout_s=0.0) is None
    return texts


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts(*HOSTS)
@pytest.mark.parametrize("bytes_", [3, 100_000])
def test_a_limit_names_the_rank_that_is_awaited(world, bytes_):
    texts = world.run(waits_with_a_limit, bytes_)[0]
    last = world.size - 1
    late = r"has not ended within 0\.05 s:"
    it = rf"rank {last} on \S+ has not called"
    expected = (
        rf"send to rank {last} with tag 3 \(a.py:7\) {late} {it} recv from rank 0 with this tag",
        rf"recv from rank {last} with tag 4 {late} {it} send to rank 0 with this tag",
        rf"recv from any rank with tag 5 {late} no rank has called send to rank 0 with this tag",
    )
    for text, pattern_of_it in zip(texts, expected, strict=True):
        assert re.fullmatch(pattern_of_it, text), text


def leaves():
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    everyone().Barrier()
    if rank == last:
        hvd.shutdown()
        everyone().Barrier()
        return None
    x = torch.zeros(5000)
    operations = [engine().recv(x, last, 1), engine().send(x, last, 1), engine().recv(x[:5], -1, 1)]
    operations.insert(2, engine().send(x[:5], last, 2))
    texts = [operation.wait() for operation in operations[:3]]
    texts.append(operations[3].wait() if last == 1 else operations[3].withdraw())
    # The others go on.
    if last > 1 and rank < 2:
        y = torch.zeros(2000)
        done(engine().send(torch.ones(2000), 1 - rank, 5), engine().recv(y, 1 - rank, 5))
        assert y.eq(1).all()
    everyone().Barrier()
    hvd.shutdown()
    return texts


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_a_rank_that_leaves_fails_those_that_wait_for_it(world):
    last = world.size - 1
    for texts in world.run(leaves)[:-1]:
        for text, what in zip(texts, ("recv from", "send to", "send to"), strict=False):
            assert re.match(rf"rank {last} on \S+ has left", text), text
            assert re.search(rf": {what} rank {last} with tag \d+ can't end$", text), text
        assert texts[3] is True if last > 1 else "all other ranks have left" in texts[3]


def leaves_with_messages_under_way():
    """Rank 1 leaves when its message is matched."""
    hvd.init()
    x = torch.zeros(4_000_000)
    if hvd.rank() == 0:
        received = engine().recv(x, 1, 1)
        hvd.barrier()
        done(received)
        assert x.eq(3).all()
    else:
        hvd.barrier()
        if hvd.rank() == 1:
            sent = engine().send(x.fill_(3), 0, 1)
            while not sent.poll() and not any(
                what == "RUNNING" and name.startswith("to rank 0")
                for _, name, what in engine().events()
            ):
                time.sleep(1e-4)
    hvd.shutdown()
    everyone().Barrier()


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_a_rank_that_leaves_ends_what_is_matched(world):
    world.run(leaves_with_messages_under_way, knobs={"HVDLITE_EVENT_LOG": "1000"})


def refused():
    hvd.init()
    x, last = torch.zeros(4, 4), hvd.size() - 1
    for call, error in (
        (lambda: engine().send(x, -1, 0), ValueError),
        (lambda: engine().send(x, last + 1, 0), ValueError),
        (lambda: engine().recv(x, -2, 0), ValueError),
        (lambda: engine().recv(x, 0, -1), ValueError),
        (lambda: engine().recv(x.t()[:, :2], 0, 1), ValueError),
        (lambda: engine().recv(x, 0), TypeError),
        (lambda: engine().recv(x, 0, 1, source=3), TypeError),
    ):
        with pytest.raises(error):
            call()


@pytest.mark.ranks(1)
def test_arguments_are_checked(world):
    world.run(refused)


@pytest.mark.parametrize("what", ["send", "recv", "recv from any"])
def test_a_rank_that_dies_fails_those_that_wait_for_it_by_name(what):
    memory = os.memfd_create("test")
    os.ftruncate(memory, _core.memory_bytes(2, 2, 4096, 65536))
    started, starts = os.pipe()
    child = os.fork()
    if not child:
        made = make_engine(1, memory)
        os.write(starts, b"x")
        time.sleep(60)
        os._exit(made is None)
    own = make_engine(0, memory)
    os.read(started, 1)
    x = torch.zeros(5000)
    waits = own.send(x, 1, 3) if what == "send" else own.recv(x, 1 if what == "recv" else -1, 3)
    os.kill(child, signal.SIGKILL)
    assert waits.wait() == "rank 1 on here has died"
    os.waitpid(child, 0)
    own.close()
    for descriptor in (memory, started, starts):
        os.close(descriptor)


def stop_when_matched(memory, x, sends):
    """A rank without a thread of its own, which stops when it has moved a part of the data."""
    made = make_engine(1, memory, progress_thread=False, event_capacity=100)
    operation = made.send(x, 0, 3) if sends else made.recv(x, 0, 3)
    while not any(state == "RUNNING" for *_, state in made.events()):
        assert not operation.poll()
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_until_stopped(child, limit_s=60):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        # It stays a child that can be killed and waited for.
        found = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            return found.si_code == os.CLD_STOPPED
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("sends", [True, False])
def test_a_message_whose_data_does_not_move_is_a_standstill(sends):
    memory = os.memfd_create("test")
    os.ftruncate(memory, _core.memory_bytes(2, 2, 4096, 65536))
    # Made before the fork: torch fills it with OpenMP, whose threads a child does not have.
    x = torch.zeros(2_000_000, dtype=torch.uint8)
    child = os.fork()
    if not child:
        try:
            stop_when_matched(memory, x, sends)
        finally:
            os._exit(1)
    own = make_engine(0, memory, stall_shutdown_s=1.0)
    try:
        operation = own.recv(x, 1, 3, "a.py:7") if sends else own.send(x, 1, 3, "a.py:7")
        assert wait_until_stopped(child)
        with pytest.raises(TimeoutError) as caught:
            operation.wait(timeout_s=0.1)
        said = "rank 1 on here has called " + ("send" if sends else "recv")
        assert said + ", and not all data has moved" in str(caught.value)
        what = "recv from" if sends else "send to"
        assert re.match(
            rf"{what} rank 1 with tag 3 has made no progress for \d s: {said}, and \w+ no data; "
            r"called by rank 0 at a\.py:7; all operations fail now",
            operation.wait(),
        )
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        own.close()
        os.close(memory)


def test_a_block_that_names_a_place_outside_its_receive_writes_nothing():
    memory = os.memfd_create("test")
    size = _core.memory_bytes(2, 2, 4096, 65536)
    os.ftruncate(memory, size)
    mine, other = (make_engine(rank, memory, progress_thread=False) for rank in range(2))
    whole = torch.zeros(310_000, dtype=torch.uint8)
    received = whole[5000:305_000]
    # The fourth block of rank 1's mailbox, the last part of the memory: for local rank 0, of its
    # first receive; its end is inside, as the sum wraps around.
    mailbox = -(-4 * (128 + 32768) // 4096) * 4096
    head = struct.pack("=IIQQ", 1, 4096, 1, 2**64 - 2048)
    os.pwrite(memory, b"\1" * 4096, size - mailbox + 4 * 128 + 3 * 32768)
    os.pwrite(memory, head, size - mailbox + 3 * 128)
    sent = pattern(300_000, 1)
    receive, send = mine.recv(received, 1, 3), other.send(sent, 0, 3)
    end = time.monotonic() + 60
    while not all([receive.poll(), send.poll()]) and time.monotonic() < end:
        pass
    done(receive, send)
    assert not whole[:5000].any()
    assert not whole[305_000:].any()
    assert torch.equal(received, sent)
    # Both close at the same time.
    closing = threading.Thread(target=mine.close)
    closing.start()
    other.close()
    closing.join()
    os.close(memory)
