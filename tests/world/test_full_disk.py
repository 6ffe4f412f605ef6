"""What a rank says of a disk that is full, where its error does not."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
from pathlib import Path

import pytest
import torch

from hvdlite.world.process.full_disk import hint
from tests.harness.needs import lacking

# Made before any fork: the threads that torch computes large tensors with are not in a child.
CHECKPOINT = torch.ones(1 << 20)


def torch_save(path):
    torch.save(CHECKPOINT, path)


def python_write(path):
    with open(path, "wb") as file:
        file.write(bytes(1 << 22))


def load_what_is_broken(path):
    Path(path).write_bytes(b"PK not a checkpoint")
    torch.load(path)


def load_what_is_missing(path):
    torch.load(path)


def limit_files(limit_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def limit_files_to_64_kib(_):
    limit_files(1 << 16)


def limit_files_to_2_mib(_):
    limit_files(1 << 21)


def mount_a_small_disk(folder, read_only=False):
    libc = ctypes.CDLL(None, use_errno=True)
    private, new_space, remount = 1 << 18 | 1 << 14, 1 << 17, 1 << 5 | 1
    assert libc.unshare(new_space) == 0
    assert libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None) == 0
    where = os.fsencode(folder)
    assert libc.mount(b"tmpfs", where, b"tmpfs", ctypes.c_ulong(0), b"size=1m") == 0
    if read_only:
        fill(folder)
        assert libc.mount(b"none", where, None, ctypes.c_ulong(remount), None) == 0


def fill(folder):
    with contextlib.suppress(OSError):
        python_write(f"{folder}/other")


def mount_a_full_disk(folder):
    mount_a_small_disk(folder)
    Path(folder, "checkpoint").write_bytes(bytes(4096))  # has its room
    fill(folder)


def mount_a_full_disk_that_is_read_only(folder):
    mount_a_small_disk(folder, read_only=True)


def fail(prepare, write, folder, answer):
    """In a process of its own."""
    prepare(folder)
    try:
        write(f"{folder}/checkpoint")
    except Exception as error:
        answer.put((hint(error), sorted(os.listdir(folder))))


def in_process(*arguments):
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=fail, args=(*arguments, answer))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
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


@pytest.mark.parametrize(
    ("limit", "limit_bytes"), [(limit_files_to_64_kib, 65536), (limit_files_to_2_mib, 2097152)]
)
@pytest.mark.parametrize("write", [torch_save, python_write])
def test_a_limit_of_the_size_of_files_is_named(write, limit, limit_bytes, tmp_path):
    said, _ = in_process(limit, write, str(tmp_path))
    assert said == (
        f"hvdlite: File too large: '{tmp_path}/checkpoint' can't grow beyond {limit_bytes} bytes"
        " (ulimit -f); raise the limit"
    )


@pytest.mark.parametrize(
    ("mount", "load"),
    [
        (mount_a_full_disk, load_what_is_broken),
        (mount_a_full_disk, load_what_is_missing),
        (mount_a_full_disk_that_is_read_only, load_what_is_missing),
    ],
)
def test_a_full_disk_is_not_to_blame_for_a_load_that_fails(mount, load, tmp_path):
    if os.geteuid():
        lacking("only root mounts a disk")
    said, _ = in_process(mount, load, str(tmp_path))
    assert said == ""


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
