"""The memory of results that the engine makes: whose it is, whatever torch does with it."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds

pytestmark = [pytest.mark.ranks(2), pytest.mark.hosts("1,1")]


def gather_without_elements(row_shape, rows):
    hvd.init()
    given = torch.empty((rows, *row_shape), dtype=torch.int16)
    gathered, exchanged = hvd.allgather(given), hvd.alltoall(given)
    return [(tuple(result.shape), result.dtype) for result in (gathered, exchanged)]


@pytest.mark.parametrize(
    ("row_shape", "rows"),
    [((), 0), ((5,), 0), ((3, 0), 2), ((1, 2**30, 2**31, 0), 2)],
)
def test_a_result_without_elements_has_its_shape_and_dtype(world, row_shape, rows):
    expected = [((2 * rows, *row_shape), torch.int16), ((rows, *row_shape), torch.int16)]
    assert world.run(gather_without_elements, row_shape, rows) == [expected] * 2


def gather_more_than_torch_can_express():
    hvd.init()
    texts = []
    for shape in ((3, 2**31, 2**31, 0), (2**62, 0)):
        try:
            hvd.allgather(torch.empty(shape))
        except (RuntimeError, OverflowError) as error:
            texts.append(str(error))
    # The engine goes on working.
    assert hvd.allgather(torch.arange(2)).tolist() == [0, 1] * 2
    return texts


def test_a_result_that_torch_can_not_express_is_an_error_and_no_crash(world):
    assert [len(texts) for texts in world.run(gather_more_than_torch_can_express)] == [2, 2]


def post(kind, shape, x, place):
    tensor = SimpleNamespace(shape=shape, data_ptr=x.data_ptr)
    posting = _core.posting(kind, "x", False, _core.FLOAT32, tensor, place=place)
    return worlds.current().team.engine.post(posting)


class DLManaged(ctypes.Structure):
    """DLPack's DLManagedTensor, up to its deleter."""

    _fields_ = (("tensor_and_context", ctypes.c_byte * 56), ("deleter", ctypes.c_void_p))


def fail_after_the_data_is_deleted():
    hvd.init()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    for _ in range(100):
        x = torch.ones(1000)
        operation = post(_core.ALLGATHER, (1000,), x, _core.ON_HOST)
        assert operation.wait() is None
        capsule = operation.capsule()
        address = pointer_of(capsule, b"dltensor")
        assert address is not None
        deleter = DLManaged.from_address(address).deleter
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(address)
        del capsule
        assert hvd.allgather(x).tolist() == [1.0] * 2000


def test_memory_that_torch_deletes_before_it_refuses_the_result_is_freed_once(world):
    world.run(fail_after_the_data_is_deleted)


def take_what_is_no_result():
    from mpi4py import MPI

    hvd.init()
    x = torch.ones(1)
    texts = []
    for kind, shape, place in (
        (_core.ALLGATHER, (1,), _core.ORDERED),
        (_core.ALLREDUCE, (), _core.ORDERED),
        (_core.JOIN, (), _core.ON_HOST),
    ):
        operation = post(kind, shape, x, place)
        assert operation.wait() is None
        assert len(operation.rows()) == 1
        try:
            operation.capsule()
        except RuntimeError as error:
            texts.append(str(error))
        MPI.COMM_WORLD.Barrier()
    return texts


def test_only_operations_with_rows_give_a_result_to_take(world):
    for texts in world.run(take_what_is_no_result):
        assert texts == ["only an allgather or alltoall has a result to take"] * 3
