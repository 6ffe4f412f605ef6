"""Staging: pieces, copies that end late, kept buffers, and how often the members agree."""

import os
from unittest import mock

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.gpu import staging
from hvdlite.gpu.devices import Devices
from hvdlite.gpu.host_buffers import HostBuffers, size_class
from tests.gpu.stand_in import LateDevices, allreduce, new_queue, request, result_of

PIECE_BYTES = 4096


def queue_of_small_pieces(devices=None, route="staged"):
    staging.PIECE_BYTES, staging.SMALL_BYTES = PIECE_BYTES, 1024
    return new_queue(route, devices or LateDevices())


def count_posts(team):
    names = []
    real = team.post

    def post(posting, *rest):
        names.append(posting.name)
        return real(posting, *rest)

    team.post = post
    return names


def count_steps():
    queue = queue_of_small_pieces()
    names = count_posts(hvd.global_process_set.team)
    devices = queue.devices
    seen = {}
    for count in (0, 100, 1000, 2047, 2048, 5000):
        for way in ("blocking", "async"):
            copies = devices.num_copies
            names.clear()
            given = torch.arange(float(count)) + hvd.rank()
            what = request("allreduce", "x", given, "Sum")
            transfer = queue.start(what, given, given, wake=way == "async")
            result_of(transfer)
            total = hvd.size() * torch.arange(float(count)) + sum(range(hvd.size()))
            assert torch.equal(given, total), (count, way)
            seen[count, way] = (devices.num_copies - copies, list(names))
    return seen


@pytest.mark.ranks(2, 3)
def test_what_is_small_is_agreed_on_once_and_what_is_large_goes_in_pieces(world):
    whole = (2, ["x"])
    pieces = {
        n: (2 * n, ["x", *(f"x (staged, piece {i + 1} of {n})" for i in range(n))]) for n in (2, 4)
    }
    expected = {0: whole, 100: whole, 1000: whole, 2047: whole, 2048: pieces[2], 5000: pieces[4]}
    for seen in world.run(count_steps):
        for (count, way), steps in seen.items():
            assert steps == expected[count], (count, way)


def need_no_thread():
    queue = queue_of_small_pieces()
    for count in (100, 5000):
        given = torch.ones(count)
        what = request("allreduce", "x", given, "Sum")
        result_of(queue.start(what, given, given, wake=False))
    return len(queue._threads)


@pytest.mark.ranks(2)
def test_a_caller_that_waits_does_all_by_itself(world):
    assert world.run(need_no_thread) == [0, 0]


def reuse_buffers():
    """The second transfer begins while the first one's copy back is queued, and nobody waits."""
    queue = queue_of_small_pieces()
    problems = []
    for count in (100, 1500, 5000):
        first, second = (torch.full((count,), value + hvd.rank()) for value in (1.0, 100.0))
        transfers = []
        for name, given in (("first", first), ("second", second)):
            transfers.append(queue.start(request("allreduce", name, given, "Sum"), given, given))
            while not transfers[-1].over:
                pass
        total = sum(range(hvd.size()))
        for transfer, value in zip(reversed(transfers), (100, 1), strict=True):
            if not result_of(transfer).eq(hvd.size() * value + total).all():
                problems.append((count, value))
    assert not problems, problems
    made = len(queue.devices.buffer_bytes)
    for i in range(20):
        assert (
            result_of(allreduce(queue, "again", torch.full((100,), float(i))))[0] == i * hvd.size()
        )
    # Two in turn: the last copy back may not be done when the next transfer begins.
    return len(queue.devices.buffer_bytes) - made


@pytest.mark.ranks(2)
def test_a_buffer_is_kept_and_used_again_when_its_copies_are_done(world):
    assert max(world.run(reuse_buffers)) <= 1


class _Mark:
    def __init__(self, reached):
        self.reached = reached

    def query(self):
        return self.reached

    def synchronize(self):
        raise AssertionError


def test_kept_buffers_are_bounded_and_those_of_the_size_used_last_stay():
    devices = mock.Mock(spec=Devices)
    devices.host_buffer.side_effect = lambda size: torch.empty(size, dtype=torch.uint8)
    pool = HostBuffers(devices, 3 * 8192)
    small, large = [pool.take(5000) for _ in range(2)], pool.take(16384)
    for buffer in small:
        pool.give_back(buffer, _Mark(True))
    pool.give_back(large, _Mark(True))
    assert pool.take(16384) is large
    assert pool.take(8192) is small[1]  # the other one had to go
    pool.give_back(small[1], _Mark(False))
    assert pool.take(8192) is not small[1]
    for size in (1, 4096, 4097, 70_000, 2**20, 2**20 + 1, 10**8):
        assert size <= size_class(size) <= max(4096 + size, size + size // 8 + 1)
    assert len({size_class(size) for size in range(1, 2**20, 511)}) < 60


def know_it_on_some():
    """Rank 0 knows that all is staged, the others do not."""
    devices = LateDevices()
    queue = queue_of_small_pieces(devices, "group")
    queue._stages_all = hvd.rank() == 0
    names = count_posts(hvd.global_process_set.team)
    rank, size = hvd.rank(), hvd.size()
    given = torch.arange(6.0 * size).view(2 * size, 3) + 100 * rank
    everyones = [given + 100 * (r - rank) for r in range(size)]
    got = {}
    for kind, result, rest in (
        ("allreduce", torch.empty_like(given), {}),
        ("broadcast", torch.empty_like(given), {"root": size - 1}),
        ("allgather", None, {}),
        ("alltoall", None, {"splits": torch.full((size,), 2)}),
        ("reducescatter", torch.empty(2, 3), {}),
    ):
        what = request(kind, kind, given, "Sum", **rest)
        got[kind] = result_of(queue.start(what, given, result))
    mine = slice(2 * rank, 2 * rank + 2)
    for kind, expected in {
        "allreduce": sum(everyones),
        "broadcast": everyones[-1],
        "allgather": torch.cat(everyones),
        "alltoall": torch.cat([t[mine] for t in everyones]),
        "reducescatter": sum(everyones)[mine],
    }.items():
        assert torch.equal(got[kind], expected), kind
    assert names == [name for kind in got for name in (kind, f"{kind} (staged)")]
    text = allreduce(queue, "bad", torch.ones(4 if rank == 1 else 3)).wait()
    after = allreduce(queue, "bad", torch.ones(3))
    assert result_of(after).tolist() == [size] * 3
    return text


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_ranks_that_do_not_know_yet_that_all_is_staged_agree_with_those_that_do(world):
    (text,) = set(world.run(know_it_on_some))
    assert "float32[4]" in text
    assert "float32[3]" in text
    assert "GPU" not in text
    assert _core.SOME_WITHOUT_DATA not in text


def compare_bits(deterministic):
    """A piece of staging is two pieces of the engine."""
    knobs = {"HVDLITE_PIECE_BYTES": str(PIECE_BYTES // 2), "HVDLITE_DETERMINISTIC": deterministic}
    with mock.patch.dict(os.environ, knobs):
        queue = queue_of_small_pieces()
    names = count_posts(hvd.global_process_set.team)
    wrong = []
    for dtype in (torch.float32, torch.float16, torch.float64):
        for count in (2048, 2100, 9001):
            torch.manual_seed(100 * count + hvd.rank())
            given = torch.randn(count, dtype=torch.float64).to(dtype)
            expected = hvd.allreduce(given, name="on the host", op=hvd.Average)
            got = result_of(allreduce(queue, "staged", given, "Average"))
            if not torch.equal(got, expected):
                wrong.append((dtype, count))
    assert not wrong, wrong
    return any("piece" in name for name in names)


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1", "2,1", "1,1,1")
@pytest.mark.parametrize("deterministic", ["0", "1"])
def test_pieces_have_the_bits_of_the_whole(world, deterministic):
    in_pieces = set(world.run(compare_bits, deterministic))
    # Where every host has one rank, how an element is added up depends on where it lies.
    assert len(in_pieces) == 1
