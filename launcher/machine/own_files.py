"""Opens files for writing (and secrets), and folders, but none that another user has put there as a
trap.

Like the kernel's fs.protected_symlinks, which is not on everywhere: refuses another user's symlink
in place of the file itself, and on the way to it in shared folders. Shared is a folder that
everyone may write to (/tmp), and below it each folder that belongs to another user. In shared
folders it also refuses files of other users. The user's own symlinks and files, and root's, are
fine everywhere.

Opens each folder from the one before, and checks what it has opened, so that nobody can exchange
anything in between. A refusal is a PermissionError with the reason and the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat

MOST_LINKS = 40  # on one path, the kernel's limit
PATH_ONLY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

Identity = tuple[int, int]  # device and inode


def identity(fd: int) -> Identity:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def open_file(
    path: str,
    flags: int,
    mode: int = 0o666,
    *,
    make: bool = False,
    ours: int = 1,
    same_as: Identity | None = None,
) -> int:
    """os.open for a file to write to. make: creates missing folders; ours: this many of the path's
    last names come from the job and not from the user, and another user's symlink is refused there
    in any folder; same_as: it must be this very file, whoever owns it (root's files on a file
    server may belong to nobody)."""
    with _Walk(path, ours) as walk:
        name = walk.to_file(0o777 if make else None)
        while True:
            status = walk.look(name)
            if status is None and flags & os.O_CREAT:
                try:
                    return walk.open(name, flags | os.O_EXCL, mode)
                except FileExistsError:
                    continue  # created just now
            known = flags & ~(os.O_TRUNC | os.O_CREAT)
            if status is not None and stat.S_ISLNK(status.st_mode):
                # A link of the kernel in /proc, to a file that a process has open.
                fd = os.open(name, known | os.O_CLOEXEC, dir_fd=walk.fd)
            else:
                if status is not None:  # check first: opening a pipe may wait for its other end
                    walk.check(name, status, same_as)
                fd = walk.open(name, known)
            try:
                status = os.fstat(fd)
                walk.check(name, status, same_as)
                if flags & os.O_TRUNC and stat.S_ISREG(status.st_mode):
                    os.ftruncate(fd, 0)
            except BaseException:
                os.close(fd)
                raise
            return fd


def open_folder(path: str, mode: int | None = None) -> int:
    """A descriptor of the folder, for `dir_fd`. mode: creates the folder if it is missing."""
    with _Walk(path) as walk:
        walk.to_folder(mode)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=walk.fd)


def remove_files(path: str, names: re.Pattern[str]) -> None:
    """Removes the user's (and root's) regular files with these names from the folder, if there is
    one."""
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return
    try:
        for name in filter(names.fullmatch, os.listdir(folder)):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and not _is_others(status):
                os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def replace(folder: int, name: str, data: bytes, mode: int | None = 0o600) -> None:
    """Replaces a file of that open folder at once: a reader sees the old content or the new one.
    mode: None for that of any new file, by the umask."""
    new = f".{name}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(new, flags, 0o666 if mode is None else 0o600, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            file.write(data)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(new, dir_fd=folder)
        raise


def _is_others(status: os.stat_result) -> bool:
    return status.st_uid not in (os.geteuid(), 0)


class _Walk:
    """Walks along a path, folder by folder; `fd` is the folder reached so far."""

    def __init__(self, path: str, ours: int = 1) -> None:
        self.ours = ours
        # An absolute path also works if the working directory is gone.
        self.path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
        self.names = self.path.split("/")[::-1]  # still to go, the next one last
        self.links = 0
        self.fd = -1
        self.is_shared = False  # others may exchange its entries
        self.above: list[bool] = []  # is_shared of the folders above it, the root first

    def __enter__(self) -> _Walk:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def to_folder(self, make: int | None) -> None:
        """Walks to the end. make: the mode of folders that are missing."""
        while self.names:
            self._step(self.names.pop(), make)

    def to_file(self, make: int | None) -> str:
        """Goes to the folder of the file, and gives the file's name there: of no symlink, but for
        those in /proc."""
        while True:
            name = ""
            while name in ("", "."):
                if not self.names:
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
                name = self.names.pop()
            if any(self.names) or name == "..":
                self._step(name, make)
                continue
            status = self.look(name)
            if status is None or not stat.S_ISLNK(status.st_mode) or _is_in_proc(status):
                return name
            self._follow(name)

    def look(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(self, name: str, flags: int, mode: int = 0) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=self.fd)

    def check(self, name: str, status: os.stat_result, same_as: Identity | None) -> None:
        """Raises PermissionError if this file must not be written to."""
        if same_as is not None:
            if (status.st_dev, status.st_ino) != same_as:
                raise self._refused(name, "this is not the same file as before")
        elif self.is_shared and _is_others(status):
            raise self._refused(
                name,
                f"this file belongs to user {status.st_uid}, who may have put it there as a trap",
            )
        elif self.is_shared and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise self._refused(
                name, "this file has a second name (a hard link), which another user may have made"
            )

    def _start(self) -> None:
        self._come_to(os.open("/", PATH_ONLY))
        self.is_shared = False
        self.above = []

    def _come_to(self, fd: int) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = fd

    def _go_up(self) -> None:
        """Whether a folder is shared depends on the folders above it, not on the way there."""
        self._come_to(os.open("..", PATH_ONLY, dir_fd=self.fd))
        if self.above:
            self.is_shared = self.above.pop()

    def _go_down(self, fd: int) -> None:
        self._come_to(fd)
        status = os.fstat(fd)
        is_open_to_all = bool(status.st_mode & stat.S_IWOTH)
        self.above.append(self.is_shared)
        self.is_shared = is_open_to_all or (self.is_shared and _is_others(status))

    def _step(self, name: str, make: int | None) -> None:
        """Into this folder, or to where this symlink leads."""
        if name in ("", "."):
            return
        if name == "..":
            self._go_up()
            return
        try:
            fd = os.open(name, PATH_ONLY, dir_fd=self.fd)
        except FileNotFoundError:
            if make is None:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o777 if self.names else make, dir_fd=self.fd)
            fd = os.open(name, PATH_ONLY, dir_fd=self.fd)
        mode = os.fstat(fd).st_mode
        if stat.S_ISLNK(mode):
            os.close(fd)
            self._follow(name)
        elif not stat.S_ISDIR(mode):
            os.close(fd)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.path)
        else:
            if not self.is_shared:  # going through a folder triggers an automounter
                os.close(fd)
                fd = os.open(f"{name}/.", PATH_ONLY, dir_fd=self.fd)
            self._go_down(fd)

    def _follow(self, name: str) -> None:
        fd = os.open(name, PATH_ONLY, dir_fd=self.fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISLNK(status.st_mode):
                raise self._refused(name, "this was replaced a moment ago")
            if _is_others(status) and (self.is_shared or sum(map(bool, self.names)) < self.ours):
                raise self._refused(name, f"this symlink belongs to user {status.st_uid}")
            target = os.readlink("", dir_fd=fd)
        finally:
            os.close(fd)
        self.links += 1
        if self.links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path)
        if target.startswith("/"):
            self._start()
        self.names += target.split("/")[::-1]

    def _refused(self, name: str, why: str) -> PermissionError:
        folder = os.readlink(f"/proc/self/fd/{self.fd}")
        return PermissionError(errno.EPERM, why, os.path.join(folder, name))


def _is_in_proc(status: os.stat_result) -> bool:
    return status.st_dev == os.stat("/proc").st_dev
