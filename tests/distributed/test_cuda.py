"""What a group does with CUDA tensors, without a GPU: it hands them to NCCL's backend.

The stand-in for NCCL is torch's FakeProcessGroup, a backend in C++ that does nothing: a method that
backends do not have fails, as does an argument of another type. The tensors are fake ones.
"""

import json
import os
import re
import signal
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode

import hvdlite as hvd
from hvdlite.distributed import cuda_calls
from hvdlite.distributed.cuda_calls import Calls
from hvdlite.distributed.process_group import HvdliteProcessGroup
from hvdrun.reports.whereabouts import Stall, read_stall
from tests.distributed.default_group import begin
from tests.observing.reports import WARNS, Said, host_of

GPU = torch.device("cuda", 0)


class Recorder:
    """A backend that notes which of its methods are called. NCCL's has one method more."""

    def __init__(self):
        self.backend = c10d.FakeProcessGroup._create_internal(0, 2)
        self.called = []

    def __getattr__(self, name):
        self.called.append(name)
        return getattr(self.backend, name)

    def _set_default_timeout(self, timeout):
        self.called.append("_set_default_timeout")


@pytest.fixture
def group():
    team = SimpleNamespace(rank=0, size=2, ranks=(0, 1))
    nccl = Recorder()
    made = HvdliteProcessGroup(team, 9.0, None, "0", "0", lambda: nccl.backend)
    made.cuda()
    made._nccl = nccl
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield made


def part():
    return torch.empty(4, device=GPU)


def whole():
    return torch.empty(8, device=GPU)


def made(kind, **values):
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


ROUND = ["_start_coalescing", "_end_coalescing"]
# A method of the group, its arguments, and which methods of the backend it calls.
CALLS = [
    ("allreduce", lambda: [[part()]], ["allreduce"]),
    ("allreduce", lambda: [part(), c10d.ReduceOp.MAX, timedelta(seconds=1)], ["allreduce"]),
    ("allreduce_coalesced", lambda: [[part(), part()]], ["allreduce_coalesced"]),
    (
        "allreduce_coalesced",
        lambda: [[part()], made(c10d.AllreduceCoalescedOptions, asyncOp=False)],
        ["allreduce_coalesced"],
    ),
    ("broadcast", lambda: [[part()]], ["broadcast"]),
    ("broadcast", lambda: [part(), 1], ["broadcast"]),
    ("reduce", lambda: [[part()]], ["reduce"]),
    ("reduce", lambda: [part(), 1, c10d.ReduceOp.MAX], ["reduce"]),
    ("allgather", lambda: [[[part(), part()]], [part()]], ["allgather"]),
    ("allgather", lambda: [[part(), part()], part()], ["allgather"]),
    ("all_gather_single", lambda: [whole(), part()], ["_allgather_base"]),
    ("_allgather_base", lambda: [whole(), part()], ["_allgather_base"]),
    *(
        (
            name,
            lambda: [[whole(), whole()], [part(), part()]],
            [ROUND[0], "_allgather_base", "_allgather_base", ROUND[1]],
        )
        for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    ),
    ("allgather_coalesced", lambda: [[[part()], [part()]], [part()]], ["allgather_coalesced"]),
    ("gather", lambda: [[[part(), part()]], [part()]], ["gather"]),
    ("gather", lambda: [[part(), part()], part(), 0], ["gather"]),
    ("scatter", lambda: [[part()], [[part(), part()]]], ["scatter"]),
    ("scatter", lambda: [part(), [part(), part()], 0], ["scatter"]),
    ("reduce_scatter", lambda: [[part()], [[part(), part()]]], ["reduce_scatter"]),
    ("reduce_scatter", lambda: [part(), [part(), part()]], ["reduce_scatter"]),
    ("reduce_scatter_single", lambda: [part(), whole()], ["_reduce_scatter_base"]),
    ("_reduce_scatter_base", lambda: [part(), whole()], ["_reduce_scatter_base"]),
    *(
        (
            name,
            lambda: [[part(), part()], [whole(), whole()]],
            [ROUND[0], "_reduce_scatter_base", "_reduce_scatter_base", ROUND[1]],
        )
        for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    ),
    ("all_to_all_single", lambda: [whole(), whole(), [2, 6], (4, 4)], ["alltoall_base"]),
    ("alltoall_base", lambda: [whole(), whole()], ["alltoall_base"]),
    ("alltoall", lambda: [[part(), part()], [part(), part()]], ["alltoall"]),
    ("barrier", lambda: [made(c10d.BarrierOptions, device=GPU)], ["barrier"]),
    ("send", lambda: [[part()], 1, 7], ["send"]),
    ("recv", lambda: [[part()], 1, 7], ["recv"]),
    ("recv_anysource", lambda: [[part()], 7], ["recv_anysource"]),
    ("_start_coalescing", lambda: [GPU], ["_start_coalescing"]),
    ("_end_coalescing", lambda: [GPU], ["_end_coalescing"]),
    ("set_timeout", lambda: [timedelta(seconds=5)], ["_set_default_timeout"]),
    ("_set_default_timeout", lambda: [timedelta(seconds=5)], ["_set_default_timeout"]),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS)
def test_cuda_tensors_go_to_methods_that_nccls_backend_has(group, name, arguments, expected):
    work = getattr(group, name)(*arguments())
    assert group._nccl.called == expected
    assert name.startswith(("_start", "_set", "set")) or isinstance(work, c10d.Work)


def test_each_method_that_asks_for_nccl_is_called_above():
    methods = {
        name: method.__code__.co_names
        for kind in HvdliteProcessGroup.__mro__
        if kind.__module__.startswith("hvdlite.")
        for name, method in vars(kind).items()
        if hasattr(method, "__code__")
    }
    asking = {name for name, names in methods.items() if {"cuda", "_nccl", "_pairs"} & {*names}}
    others = {"_pairs", "__init__", "cuda", "_get_backend", "_leave"}
    assert asking ^ others == {name for name, _, _ in CALLS}


def test_coalescing_ends_when_an_operation_in_it_fails(group):
    with pytest.raises(TypeError):
        group.all_gather_single_coalesced([whole(), None], [part(), part()])
    assert group._nccl.called == [ROUND[0], "_allgather_base", "_allgather_base", ROUND[1]]


# As torch 2.13 writes it, of an operation that has not ended.
ENTRY = {
    "collective_seq_id": 8,
    "input_dtypes": ["Float"],
    "input_sizes": [[3]],
    "is_p2p": False,
    "op_id": 8,
    "output_dtypes": ["Float"],
    "output_sizes": [[3]],
    "p2p_seq_id": 0,
    "pg_id": 1,
    "process_group": ["main", "undefined"],
    "profiling_name": "nccl:all_reduce",
    "record_id": 7,
    "retired": False,
    "state": "scheduled",
    "time_created_ns": 1795780517292919571,
    "time_discovered_completed_ns": 0,
    "time_discovered_started_ns": 0,
    "timeout_ms": 1800000,
}
OTHERS = [ENTRY | other for other in ({"is_p2p": True}, {"process_group": ["1", "undefined"]})]


def trace(entries):
    def dump(includeCollectives, onlyActive):
        assert includeCollectives
        assert onlyActive
        return json.dumps({"version": "2.10", "pg_status": {}, **entries}).encode()

    return dump


class Members:
    """The ranks of a group in this process. calls[m]: how many collectives member m has called."""

    def __init__(self, ranks, hosts):
        self.calls = [0] * len(ranks)
        store = dist.PrefixStore("group/", dist.HashStore())
        self.counted = [
            Calls(
                SimpleNamespace(rank=member, size=len(ranks), ranks=ranks),
                SimpleNamespace(
                    _get_sequence_number_for_group=lambda member=member: self.calls[member]
                ),
                *(store, "main", hosts, 60.0),
            )
            for member in range(len(ranks))
        ]

    def look(self, now):
        """All look, the first member last. Returns what it reports."""
        texts = [calls.look(now) for calls in reversed(self.counted)]
        assert texts[:-1] == [None] * (len(texts) - 1)
        return texts[-1]


END = "; do all ranks take the same path through the program?"


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        ({"entries": [*OTHERS, ENTRY]}, "all_reduce"),
        ({"entries": OTHERS}, "collective"),
        ({}, ""),
        ({"entries": [{}]}, ""),
    ],
)
def test_ranks_that_have_not_called_a_cuda_collective_are_reported_once(monkeypatch, entries, kind):
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", trace(entries), raising=False)
    members = Members((4, 5, 7, 8), ("a", "a", "b", "b"))
    for now in range(0, 150, 15):  # all go on, at paces of their own
        members.calls = [now // 15, now // 15, now // 30, now // 20]
        assert members.look(float(now)) is None
    members.calls = [10, 8, 7, 7]
    assert [members.look(now) for now in (160.0, 170.0, 229.0)] == [None] * 3
    text = members.look(231.0)
    operation = f"{kind or 'collective'} 8 of group 'main' on CUDA tensors"
    waited = f"{operation} has waited 61 s for rank 7 on b, rank 8 on b; called by ranks 4-5"
    assert text == waited + END
    assert read_stall(text, 9) == Stall(operation, (7, 8), (4, 5))
    assert members.look(400.0) is None
    members.calls[2] = 8  # another one is late now
    assert [members.look(now) for now in (410.0, 471.0)] == [None] * 2
    members.calls = [10] * 4
    assert [members.look(now) for now in (500.0, 600.0)] == [None] * 2


def test_the_first_rank_reports_itself_and_ranks_that_have_called_nothing(monkeypatch):
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json", raising=False)
    members = Members(tuple(range(12)), ("a",) * 12)
    members.calls[5] = 1
    assert [members.look(now) for now in (0.0, 10.0)] == [None] * 2
    named = ", ".join(f"rank {rank} on a" for rank in (0, 1, 2, 3, 4, 6, 7, 8))
    assert members.look(70.0) == (
        f"collective 1 of group 'main' on CUDA tensors has waited 60 s for {named}, 3 more; "
        f"called by rank 5{END}"
    )


class Waits:
    """A count that does not come before another group's thread was told to end."""

    def __init__(self):
        self.begun = threading.Event()
        self.told = []

    def _get_sequence_number_for_group(self):
        self.begun.set()
        self.told.append(self.other._ending.wait(5.0))
        return 0


@pytest.fixture
def two(monkeypatch):
    """The counts of two groups whose threads wait for each other's end."""
    monkeypatch.setattr(cuda_calls, "STOP_S", 60.0)
    team, store = SimpleNamespace(rank=0, size=2, ranks=(0, 1)), dist.HashStore()
    both = [Calls(team, Waits(), store, name, ("a", "a"), 0.01) for name in ("0", "1")]
    for calls, other in zip(both, reversed(both), strict=True):
        calls._nccl.other = other
        calls.start()
        assert calls._nccl.begun.wait(5.0)
    yield both
    cuda_calls.stop(set(both))


def test_the_threads_of_all_groups_are_told_to_end_before_one_is_waited_for(two):
    cuda_calls.stop(cuda_calls._running)
    for calls in two:
        assert calls._nccl.told == [True]
        assert not calls._thread.is_alive()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of os.fork beside threads
def test_a_forked_child_leaves_the_threads_of_its_parent_alone(two):
    def hold(*args):
        signal.raise_signal(signal.SIGKILL)

    child = os.fork()
    if not child:
        for calls in two:
            calls._ending.set = calls._thread.join = hold
        cuda_calls.stop(cuda_calls._running)
        cuda_calls.stop(set(two))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def one_does_not_call(folder):
    hvd.shutdown()  # of an earlier test
    begin(folder)
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    said, group = Said(), dist.group.WORLD
    counting = SimpleNamespace(_get_sequence_number_for_group=lambda: 2 - rank // last)
    group._calls = cuda_calls.begin(group.team, counting, group.get_group_store(), "0")
    (line,) = said.wait_for("collective 2 of group '0' on CUDA tensors")
    assert re.search(rf" for rank {last} on {host_of(last)}; called by ranks? 0", line), line
    hvd.barrier()
    assert "hvdlite CUDA calls" in [thread.name for thread in threading.enumerate()]
    dist.destroy_process_group()
    assert "hvdlite CUDA calls" not in [thread.name for thread in threading.enumerate()]
    hvd.shutdown()


@pytest.mark.ranks(2)
@pytest.mark.above_mpi
def test_a_thread_looks_until_the_last_group_is_closed(world, tmp_path):
    world.run(one_does_not_call, tmp_path, knobs=WARNS)
