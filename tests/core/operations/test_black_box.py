"""What the core writes into the black box, as the keeper and hvdrun read it."""

import ctypes
import json
import mmap
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdlite import _core
from hvdrun.agent.rank.notes import RankBox
from hvdrun.machine.notes import ENTRIES, FORMAT, TOTAL_BYTES
from hvdrun.reports import last_operations
from hvdrun.reports.black_box import Box, read_box
from tests.core.engines import BLOCK_BYTES, INLINE_BYTES, make_engine
from tests.harness.compiled import with_core
from tests.harness.programs import run_program


class Members:
    """The engines of two ranks, in this process, which take turns; each has a box."""

    def __init__(self, label):
        shared = os.memfd_create("test")
        os.ftruncate(shared, _core.memory_bytes(2, 2, INLINE_BYTES, BLOCK_BYTES))
        self.fds = [os.memfd_create("box", os.MFD_ALLOW_SEALING) for _ in range(2)]
        self.boxes = []
        for fd in self.fds:
            os.ftruncate(fd, _core.BLACK_BOX_BYTES)
            box = mmap.mmap(fd, _core.BLACK_BOX_BYTES)
            head = json.dumps({"format": FORMAT, "kinds": _core.KIND_NAMES, "to_wall_ns": 0})
            box[: len(head)] = head.encode()
            self.boxes.append(box)
        self.engines = [self._engine(rank, shared, box) for rank, box in enumerate(self.boxes)]
        os.close(shared)

    @staticmethod
    def _engine(rank, shared, box):
        address = ctypes.addressof(ctypes.c_char.from_buffer(box))
        return make_engine(
            rank, shared, progress_thread=False, world_ranks=(4, 7), black_box=(address, 99)
        )

    def post(self, rank, name, elements=3, unnamed=False):
        buffer = (ctypes.c_float * elements)()
        tensor = SimpleNamespace(
            shape=(elements,), data_ptr=lambda: ctypes.addressof(buffer), kept=buffer
        )
        posting = _core.posting(
            _core.ALLREDUCE, name, unnamed, _core.FLOAT32, tensor, tensor, _core.MAX
        )
        operation = self.engines[rank].post(posting, False)
        operation.poll()
        return operation

    def all_call(self, name, elements=3, unnamed=False):
        """Rank 1 is the last one."""
        operations = [self.post(rank, name, elements, unnamed) for rank in range(2)]
        while operations:
            operations = [operation for operation in operations if not operation.poll()]

    def read(self, rank, all_of_them=True):
        box = RankBox()
        box.keep(os.dup(self.fds[rank]))
        found = read_box(box.read(all_of_them))
        os.close(box.fd)
        return found.operations

    def close(self):
        for engine in self.engines:
            engine.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def members(request):
    found = Members(request.node.name)
    yield found
    found.close()


def test_an_operation_has_its_times_and_who_came_last(members):
    members.all_call("small")
    members.all_call("large", 100_000)
    for rank in range(2):
        small, large = members.read(rank)
        assert (small.kind, small.name, small.bytes) == ("allreduce", "small", 12)
        assert (large.kind, large.name, large.bytes) == ("allreduce", "large", 400_000)
        for each in (small, large):
            assert 0 < each.posted <= each.matched <= each.started <= each.ended
            assert (each.failed, each.members, each.team, each.peer) == (False, 2, 99, 7)
        assert small.number < large.number
    assert [a.identity for a in members.read(0)] == [b.identity for b in members.read(1)]


def test_what_others_have_not_called_is_posted_and_then_failed(members):
    members.all_call("a")
    members.post(0, "b")
    _, waits = members.read(0)
    assert (waits.matched, waits.started, waits.ended, waits.peer) == (0, 0, 0, -1)
    members.engines[0].close()
    _, failed = members.read(0)
    assert failed.failed
    assert failed.ended >= failed.posted
    assert [each.name for each in members.read(1)] == ["a"]


def test_each_coming_of_a_name_has_its_number_in_whatever_order_names_come(members):
    for name in "abacaab":
        members.all_call(name)
    assert [(each.name, each.round) for each in members.read(0)] == [
        *(("a", 1), ("b", 1), ("a", 2), ("c", 1)),
        *(("a", 3), ("a", 4), ("b", 2)),
    ]


def standings_of(members):
    boxes = {rank: Box(0, members.read(rank)) for rank in range(2)}
    return last_operations.standings(boxes, 2)


def call_in_random_orders(members, names, steps, left_out=None):
    """In each step each rank posts all names in an order of its own, and waits for all of them;
    in the last one rank 1 leaves one out, for which rank 0 waits."""
    chosen = random.Random(7)
    for step in range(steps):
        waits = []
        for rank in range(2):
            order = chosen.sample(names, len(names))
            if rank == 1 and step == steps - 1:
                order = [name for name in order if name != left_out]
            waits += [members.post(rank, name) for name in order]
        is_last = step == steps - 1 and left_out is not None
        while len(waits) > is_last:
            waits = [operation for operation in waits if not operation.poll()]


@pytest.mark.parametrize("num_names", [100, 400])
def test_many_names_keep_their_counts_in_whatever_order_ranks_call_them(members, num_names):
    names = [f"n{number}" for number in range(num_names)]
    call_in_random_orders(members, names, 4)
    for rank in range(2):
        assert {each.round for each in members.read(rank)[-num_names:]} == {4}
    assert not any(standing.tells_more for standing in standings_of(members))


@pytest.mark.parametrize("num_names", [100, 400])
def test_of_many_names_the_one_that_a_rank_has_not_called_is_told(members, num_names):
    names = [f"n{number}" for number in range(num_names)]
    call_in_random_orders(members, names, 3, left_out="n17")
    (standing,) = standings_of(members)
    lacking = {key: ranks for key, ranks in standing.lacking.items() if ranks}
    ahead = {each.identity: each for group in standing.groups for each in group.ahead}
    assert [(ahead[key].name, ahead[key].round) for key in lacking] == [("n17", 3)]
    assert list(lacking.values()) == [(1,)]


def test_a_name_for_which_there_is_no_room_is_not_counted_and_others_are(members):
    for number in range(16384):
        members.all_call(f"n{number}")
    for name in ("more", "n5", "more", "n16383"):
        members.all_call(name)
    found = [(each.name, each.round) for each in members.read(0)[-4:]]
    assert found == [("more", 0), ("n5", 2), ("more", 0), ("n16383", 2)]


def test_names_that_are_made_for_operations_are_as_many_as_they_like(members):
    for number in range(16384 + 10):
        members.all_call(f"0.{number}", unnamed=True)
    members.all_call("named")
    assert {each.round for each in members.read(0)} == {1}
    (standing,) = standings_of(members)
    assert standing.last.name == "named"


def test_the_latest_are_kept_and_those_that_have_not_ended(members):
    members.all_call("early")
    members.post(0, "waits")
    for _ in range(ENTRIES + 10):
        members.all_call("x")
    names = [each.name for each in members.read(0)]
    assert names == ["waits", *["x"] * (ENTRIES - 1)]
    assert [each.round for each in members.read(0)[-2:]] == [ENTRIES + 9, ENTRIES + 10]


def test_of_a_rank_that_has_ended_well_a_few_are_read(members):
    for number in range(40):
        members.all_call(f"n{number}")
    names = [each.name for each in members.read(0, all_of_them=False)]
    assert names == [f"n{number}" for number in range(8, 40)]


@pytest.mark.parametrize("length", [1, 111, 112, 113, 500])
def test_a_long_name_is_cut_in_the_middle(members, length):
    name = ("front of it" + "." * length + "the end")[-length:]
    members.all_call("before, as long as it can be, " * 4)
    members.all_call(name)
    shown = members.read(0)[-1].name
    assert shown == (name if length <= 112 else name[:40] + "..." + name[-69:])


def test_the_memory_has_the_size_that_its_readers_expect():
    assert _core.BLACK_BOX_BYTES == TOTAL_BYTES


def test_names_that_are_cut_alike_are_not_taken_for_the_same(members):
    members.all_call("x" * 100)
    members.all_call("x" * 101)
    assert len({each.identity for each in members.read(0)}) == 2


def test_an_entry_that_is_read_while_it_is_written_is_of_one_operation(tmp_path):
    path = with_core(tmp_path / "program", Path(__file__).with_name("box_readers.c"))
    finished = run_program([path, "1500"], 120)
    assert finished.code == 0, finished
    assert finished.stdout == "all entries read, 0 wrong\n"
