"""The files of a Checkpointer: one for each checkpoint, complete or not there.

A checkpoint is a file of `torch.save`, a zip archive with a CRC-32 of each tensor in it. It is
written under another name and gets its own one when it is on the disk; the oldest ones are removed
after that. So whatever ends the process, every checkpoint that was complete is there, and whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import torch

from hvdlite.world.telling.logs import log
from hvdrun.for_hvdlite import open_file, open_folder

COMPLETE = re.compile(r"checkpoint-(\d{9,})\.pt")
UNFINISHED = re.compile(r"\.checkpoint-\d{9,}\.pt\.unfinished")

VERSION = 1
LOWEST_PRIORITY = 19
_BEGIN = b"PK\x03\x04"
KEY = "hvdlite"  # of what the file holds beside the states of the objects


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, and those before it are complete; or one that may be whole
    could not be read. The text says what to do; on rank 0 the cause says more."""


class _Damaged(Exception):
    """The file is proven not to be a whole checkpoint; the text says why."""


def name_of(step: int) -> str:
    """
    >>> name_of(1200)
    'checkpoint-000001200.pt'
    """
    return f"checkpoint-{step:09d}.pt"


class CheckpointFolder:
    """The folder, of which only one rank reads and writes."""

    def __init__(self, path: str, keep: int | None) -> None:
        """keep: how many checkpoints; None: all."""
        self.path = os.path.abspath(path)
        self._keep = keep
        # The steps of files that are not whole.
        self._bad: set[int] = set()

    def prepare(self) -> None:
        """Makes the folder, on the disk, and removes what a killed writer has left. Only one job at
        a time may use the folder.

        Raises:
            OSError: It can't be made or listed, or leads through a symlink of another user.
        """
        new, path = [], self.path
        while not os.path.lexists(path):
            new.append(path)
            path = os.path.dirname(path)
        with self._opened() as folder:
            for name in os.listdir(folder):
                if UNFINISHED.fullmatch(name):
                    os.unlink(name, dir_fd=folder)
        # The entry of a new folder is brought to the disk with the folder above it: else a crash
        # of the host takes the folder away, whatever is brought to the disk in it.
        for each in new:
            _sync_folder(os.path.dirname(each))

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in their order."""
        with self._opened() as folder:
            found = map(COMPLETE.fullmatch, os.listdir(folder))
            return sorted(int(match[1]) for match in found if match)

    def check_next(self, step: int) -> None:
        """Raises ValueError if there are later checkpoints, which `newest` would prefer."""
        later = [each for each in self.steps() if each > step and each not in self._bad]
        if later:
            raise ValueError(
                f"Checkpointer.save: step {step} is before {name_of(later[-1])} in {self.path}, "
                "with which restore() would go on; call restore() first, or use another folder, or "
                "remove the later checkpoints"
            )

    def write(self, step: int, tree: Any) -> None:
        """Writes a checkpoint, and then removes the oldest ones.

        Raises:
            OSError: It could not be written; nothing of it is left, and none is removed.
        """
        name = name_of(step)
        unfinished = f".{name}.unfinished"
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._opened() as folder:
            descriptor = os.open(unfinished, new, 0o666, dir_fd=folder)
            try:
                with open(descriptor, "wb") as file:
                    _save(tree, file)
                    file.flush()
                    os.fsync(descriptor)
                os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise
            os.fsync(folder)
            self._bad.discard(step)
            self._remove_before(step, folder)

    def newest(self) -> tuple[int, Any] | None:
        """The latest checkpoint that is whole, with its step; None if there is none. Passes over
        those that are proven to be damaged, and says which and why.

        Raises:
            CheckpointError: Before it comes one that can't be read and may be whole. To pass over
                that one would lose it, as later saves remove the oldest ones.
        """
        try:
            steps = self.steps()
        except OSError as error:
            raise CheckpointError(
                f"Checkpointer.restore: {self.path} can't be listed: {error}; make it readable for "
                "rank 0, or use another folder"
            ) from error
        for step in reversed(steps):
            path = os.path.join(self.path, name_of(step))
            try:
                tree = self._read(step)
            except _Damaged as damage:
                log.warning("rank 0: %s is passed over: %s", path, damage)
                self._bad.add(step)
            except OSError as error:
                raise CheckpointError(
                    f"Checkpointer.restore: {path} can't be read: {error}; make it readable for "
                    f"rank 0, or {_WITHOUT_IT}"
                ) from error
            else:
                self._bad.discard(step)
                return step, tree
        return None

    def _read(self, step: int) -> Any:
        """Raises _Damaged, OSError, or a CheckpointError if it is whole and is refused."""
        # Without O_NONBLOCK the opening of a named pipe would wait for a writer, for ever.
        path = os.path.join(self.path, name_of(step))
        descriptor = open_file(path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _Damaged("it is no regular file")
        with open(descriptor, "rb") as file:
            _check_sums(file)
            file.seek(0)
            tree = _load(file, path)
        about = tree.get(KEY) if isinstance(tree, dict) else None
        about = about if isinstance(about, dict) else {}
        if about.get("version") != VERSION or about.get("step") != step:
            raise CheckpointError(
                f"Checkpointer.restore: {path} holds step {about.get('step')} in version "
                f"{about.get('version')} of the format, expected step {step} in version {VERSION}; "
                "restore with the hvdlite that has written it, give the file the name of its step, "
                f"or {_WITHOUT_IT}"
            )
        return tree

    def _remove_before(self, step: int, folder: int) -> None:
        """Removes what is older than the checkpoints to be kept, of which that step is the last."""
        if self._keep is None:
            return
        steps = [each for each in self.steps() if each <= step]
        kept = [each for each in steps if each not in self._bad][-self._keep :]
        for each in steps:
            if each < kept[0]:
                # Gone already, or a folder of that name, which is nobody's checkpoint.
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name_of(each), dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder's descriptor; no symlink of another user leads there."""
        folder = open_folder(self.path, 0o777)
        try:
            yield folder
        finally:
            os.close(folder)


def _sync_folder(path: str) -> None:
    try:
        folder = open_folder(path)
    except PermissionError:
        return  # who may write there and not read can't bring it to the disk
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_WITHOUT_IT = "move it out of the folder to go on with the checkpoint before it"


def _check_sums(file: IO[bytes]) -> None:
    """Raises _Damaged unless every part of the archive has its checksum. OSError is for the disk's
    own failures."""
    # zipfile looks for the end of an archive, and torch for its beginning: what else begins there
    # it would read in its older ways, which unpickle anything before torch 2.6.
    if file.read(len(_BEGIN)) != _BEGIN:
        raise _Damaged("it does not begin as an archive of torch.save")
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except MemoryError:
        raise
    except Exception as error:
        # zipfile has errors of many kinds for a damaged directory, EINVAL of seeking to where it
        # points among them; and it says of a disk's failure, too, that the archive is bad.
        cause = _disk_error(error)
        if cause is not None and cause.errno != errno.EINVAL:
            raise cause from None
        raise _Damaged(_line_of(error)) from error
    if damaged is not None:
        raise _Damaged(f"the checksum of {damaged} in it is wrong")


def _load(file: IO[bytes], path: str) -> Any:
    """torch.load of an archive whose checksums are right."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        cause = _disk_error(error)
        if cause is not None:
            raise cause from None
        line = _line_of(error)
        # torch looks at more of the archive's own data than zipfile does.
        if line.startswith("PytorchStreamReader failed"):
            raise _Damaged(line) from error
        unknown = re.search(r"GLOBAL (\S+) was not an allowed global", line)
        if unknown:
            line = f"it has a {unknown[1]}"
        raise CheckpointError(
            f"Checkpointer.restore: {path} is whole, and torch.load(weights_only=True) refuses it: "
            f"{line}; name the classes in it with torch.serialization.add_safe_globals, as the "
            f"script that saved it did, use the PyTorch that has written it, or {_WITHOUT_IT}"
        ) from error


def _disk_error(error: BaseException | None) -> OSError | None:
    """The OSError that this one is, or was raised after."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _line_of(error: Exception) -> str:
    """The cause, in one line. torch's own texts have several, advice for other cases and the
    escapes of terminals."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).rpartition("WeightsUnpickler error:")[2]
    return text.strip().split("\n")[0] or type(error).__name__


_saving = threading.Lock()


def _save(tree: Any, file: IO[bytes]) -> None:
    """torch.save. Of a Python file, and not of a path: then it holds the interpreter's lock for
    microseconds at a time only, and the training loop goes on meanwhile."""
    with _saving:
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(True)
        try:
            torch.save(tree, file)
        except Exception as error:
            # After a failed write torch raises an error of its own, about its archive.
            cause = _disk_error(error)
            if cause is not None:
                raise cause from None
            raise
        finally:
            torch.serialization.set_crc32_options(checksums)


class BackgroundWriter:
    """Writes in a thread, one checkpoint at a time. The interpreter does not end before it has."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._failed: tuple[int, BaseException] | None = None

    def start(self, step: int, tree: Any) -> None:
        """Only after `wait`."""
        self._thread = threading.Thread(
            target=self._run, args=(step, tree), name="hvdlite-checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Blocks until nothing is being written.

        Raises:
            CheckpointError: What was written since the last `wait` has failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            step, error = failed
            raise CheckpointError(
                f"{self._folder.path}/{name_of(step)} could not be written: {error}; the "
                "checkpoints before it are complete"
            ) from error

    def wait_at_last(self) -> None:
        """Like `wait`, when nobody is there to catch an error: logs it."""
        try:
            self.wait()
        except CheckpointError as error:
            log.error("rank 0: %s", error)

    def _run(self, step: int, tree: Any) -> None:
        try:
            # Of this thread alone: it takes what time the training leaves of the cores. While a
            # `wait` or the next save waits for it, that is enough.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            self._folder.write(step, tree)
        except BaseException as error:
            self._failed = step, error
