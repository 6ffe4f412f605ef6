"""shared_tensor: data of which a host has one copy."""

import contextlib
import gc
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite as hvd
from tests.harness.programs import run_program

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.hosts("2,1"),
    pytest.mark.wide_in(1, 3, "mpich"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.complex128]


def numbers(shape, dtype):
    count = int(torch.tensor(shape).prod())
    return torch.arange(count).remainder(100).reshape(shape).to(dtype)


def region_at(address):
    """The inode of the file that this address is mapped from, and its permissions."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[4], line.split()[1]
    return None


def fills(shape, parts):
    hvd.init()
    wrong = []
    for dtype in DTYPES:
        wanted = numbers(shape, dtype)
        calls = []

        def fill(part, *begin, wanted=wanted, calls=calls):
            calls.append((len(part), *begin))
            assert not part.ne(0).any()
            first = begin[0] if begin else 0
            part.copy_(wanted[first : first + len(part)])

        tensor = hvd.shared_tensor(shape, dtype, fill, parts=parts)
        if not torch.equal(tensor, wanted) or tensor.dtype != dtype or not tensor.is_contiguous():
            wrong.append((dtype, tensor))
        everyones = [sum(calls, ()) for calls in hvd.allgather_object(calls)]
        local = everyones[hvd.rank() - hvd.local_rank() :][: hvd.local_size()]
        if parts:
            if sum(rows for rows, _ in local) != shape[0] or [b for _, b in local] != sorted(
                {b for _, b in local}
            ):
                wrong.append(local)
        elif local != [(shape[0],)] + [()] * (hvd.local_size() - 1):
            wrong.append(local)
        inode, permissions = region_at(tensor.data_ptr())
        if permissions != "r--s":
            wrong.append(permissions)
        inodes = hvd.allgather_object(inode)[hvd.rank() - hvd.local_rank() :]
        if len(set(inodes[: hvd.local_size()])) != 1:
            wrong.append(inodes)
    assert not wrong


@pytest.mark.parametrize("parts", [False, True])
def test_a_host_has_one_copy_with_what_its_ranks_have_filled_in(world, parts):
    world.run(fills, (7, 5), parts)


def without_fill():
    hvd.init()
    tensor = hvd.shared_tensor((2, 3))
    assert tensor.eq(0).all()
    hvd.barrier()
    if hvd.local_rank() == hvd.local_size() - 1:
        tensor += 3
    hvd.barrier()
    assert tensor.eq(3).all()
    assert hvd.shared_tensor(4, torch.int8).shape == (4,)
    assert hvd.shared_tensor((), torch.int8).shape == ()
    assert hvd.shared_tensor((0, 4), fill=lambda tensor: tensor.fill_(1)).shape == (0, 4)
    assert hvd.shared_tensor((1, 2), fill=lambda part, begin: part.fill_(7), parts=True).eq(7).all()


def test_without_fill_it_is_zeros_that_every_rank_may_write(world):
    world.run(without_fill)


def refused():
    hvd.init()
    for arguments, text in (
        (((-1,),), "shape=\\(-1,\\)"),
        (("ab",), "shape='ab'"),
        (((2,), torch.qint8), "qint8"),
        (((2,), torch.float32, 3), "fill is int"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.shared_tensor(*arguments)
    with pytest.raises(ValueError, match="parts=True"):
        hvd.shared_tensor((2,), parts=True)
    last = hvd.size() - 1
    if hvd.size() > 1:
        text = r"the ranks' arguments differ: float32\[2\] on ranks? .*, float32\[3\] on rank"
        with pytest.raises(hvd.HorovodInternalError, match=text):
            hvd.shared_tensor(3 if hvd.rank() == last else 2)

    def fail(part, begin):
        if hvd.rank() == last:
            raise KeyError("no such file")

    error = KeyError if hvd.rank() == last else hvd.HorovodInternalError
    text = "no such file" if hvd.rank() == last else rf"failed on rank {last}: KeyError: 'no such"
    with pytest.raises(error, match=text):
        hvd.shared_tensor(8, fill=fail, parts=True)
    with pytest.raises(MemoryError, match=r"shared_tensor: .* of memory, but .*; make a smaller"):
        hvd.shared_tensor(1 << 50)


def test_bad_arguments_and_failures_are_errors_on_every_rank(world):
    world.run(refused)


def has_open(inode):
    """Whether this process has mapped or opened that memory."""
    opened = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.add(str(os.stat(entry.path).st_ino))
    mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}
    return inode in opened | mapped


def is_freed():
    hvd.init()
    gc.collect()
    hvd.barrier()
    files = set(os.listdir("/dev/shm"))
    tensor = hvd.shared_tensor((1 << 20,), torch.uint8, lambda tensor: tensor.fill_(1))
    inode, _ = region_at(tensor.data_ptr())
    row = tensor[5:10]
    del tensor
    gc.collect()
    assert has_open(inode)
    assert row.eq(1).all()
    assert not {f for f in set(os.listdir("/dev/shm")) - files if "hvdlite" in f}
    del row
    gc.collect()
    assert not has_open(inode)


def test_it_is_freed_with_its_last_view_and_leaves_no_file(world):
    world.run(is_freed)


class Places:
    """A dataset whose items say where the worker has the data."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return int(region_at(self.data.data_ptr())[0]), float(self.data.sum()), self.data[index]


def in_workers(method):
    hvd.init()
    tensor = hvd.shared_tensor((4, 2), fill=lambda t: t.copy_(torch.arange(8.0).view(4, 2)))
    address = tensor.data_ptr()
    inode, _ = region_at(address)
    loader = DataLoader(Places(tensor), None, num_workers=1, multiprocessing_context=method)
    wrong = []
    for index, (place, total, row) in enumerate(loader):
        if (place, total) != (int(inode), 28.0):
            wrong.append((place, total))
        # A view that the worker sends back is of the same memory, at the same address.
        if row.data_ptr() != address + 8 * index or row.tolist() != [2 * index, 2 * index + 1]:
            wrong.append(row)
    assert tensor.data_ptr() == address
    assert region_at(address) == (inode, "r--s")
    batches = DataLoader(TensorDataset(tensor), 2, num_workers=1, multiprocessing_context=method)
    assert [batch.tolist() for (batch,) in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert not wrong


@pytest.mark.wide_in("2,1")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.wide)])
def test_a_data_loaders_workers_have_the_same_memory(world, method):
    world.run(in_workers, method)


WRITES = """
import torch
import hvdlite as hvd
hvd.init()
tensor = hvd.shared_tensor(10, fill=lambda tensor: tensor.fill_(1))
tensor[3] = 2  # the culprit
"""


def test_a_write_ends_the_rank_and_shows_the_line():
    done = run_program([sys.executable, "-c", WRITES], limit_s=60)
    assert done.code == -signal.SIGSEGV
    assert re.search(r'File "<string>", line 6 in <module>', done.stderr), done.stderr
