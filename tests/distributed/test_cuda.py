"""What a group does with CUDA tensors, without a GPU: it hands them to NCCL's backend.

The stand-in for NCCL is torch's FakeProcessGroup, a backend in C++ that does nothing: a method that
backends do not have fails, as does an argument of another type. The tensors are fake ones.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode

from hvdlite.distributed.process_group import HvdliteProcessGroup

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
    asking = {name for name, names in methods.items() if "cuda" in names or "_nccl" in names}
    others = {"__init__", "cuda", "_get_backend", "shutdown", "abort"}
    assert asking ^ others == {name for name, _, _ in CALLS}


def test_coalescing_ends_when_an_operation_in_it_fails(group):
    with pytest.raises(TypeError):
        group.all_gather_single_coalesced([whole(), None], [part(), part()])
    assert group._nccl.called == [ROUND[0], "_allgather_base", "_allgather_base", ROUND[1]]
