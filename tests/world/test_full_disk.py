"""What a rank says of a disk that is full, where its error does not."""

import ctypes
import multiprocessing
import os
import resource

import pytest
import torch

from hvdlite.world.process.full_disk import hint
from tests.harness.needs import lacking


def torch_save(path):
    torch.save(torch.ones(1 << 20), path)


def python_write(path):
    with open(path, "wb") as file:
        file.write(bytes(1 << 22))


def limit_files(_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def mount_a_small_disk(folder):
    libc = ctypes.CDLL(None, use_errno=True)
    private, new_space = 1 << 18 | 1 << 14, 1 << 17
    assert libc.unshare(new_space) == 0
    assert libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None) == 0
    where = os.fsencode(folder)
    assert libc.mount(b"tmpfs", where, b"tmpfs", ctypes.c_ulong(0), b"size=1m") == 0


def fail(prepare, write, folder, answer):
    """In a process of its own."""
    prepare(folder)
    try:
        write(f"{folder}/checkpoint")
    except (OSError, RuntimeError) as error:
        answer.put((hint(error), sorted(os.listdir(folder))))


def in_process(*arguments):
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=fail, args=(*arguments, answer))
    child.start()
    child.join()
    assert child.exitcode == 0
    return answer.get()


@pytest.mark.parametrize("write", [torch_save, python_write])
def test_the_disk_of_a_file_that_could_not_be_written_is_named(write, tmp_path):
    if os.geteuid():
        lacking("only root mounts a disk")
    said, left = in_process(mount_a_small_disk, write, str(tmp_path))
    assert said == (
        f"hvdlite: No space left on device: '{tmp_path}/checkpoint' is on the disk mounted at"
        f" '{tmp_path}', of which 0.0 of 1.0 MiB are free; make room there, or write to another"
        " disk"
    )
    assert left == ["checkpoint"]


@pytest.mark.parametrize("write", [torch_save, python_write])
def test_a_limit_of_the_size_of_files_is_named(write, tmp_path):
    said, _ = in_process(limit_files, write, str(tmp_path))
    assert said == (
        f"hvdlite: File too large: '{tmp_path}/checkpoint' can't grow beyond 65536 bytes (ulimit"
        " -f); raise the limit"
    )


def error_of(call, *arguments):
    with pytest.raises(Exception, match=r".*") as caught:
        call(*arguments)
    return caught.value


def test_other_errors_are_not_explained_by_a_disk(tmp_path):
    assert hint(error_of(torch.save, lambda: None, tmp_path / "checkpoint")) == ""
    assert hint(error_of(torch_save, "/no/such/folder/x")) == ""
    assert hint(error_of(int, "x")) == ""
    # Full, but a device: there is room on the disk where it stands.
    assert hint(error_of(python_write, "/dev/full")) == ""
