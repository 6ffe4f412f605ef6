"""A terminal in which a test runs hvdrun."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import time

from tests.harness.worlds import ROOT, end_tree

LIMIT_S = 30.0


class Terminal:
    """A terminal in which hvdrun is the program in the foreground."""

    def __init__(self, python):
        self.python = python
        self.fd, self.inside = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.seen = b""
        self.process = None
        os.set_blocking(self.fd, False)

    def hvdrun(self, *arguments):
        self.process = subprocess.Popen(
            [self.python.with_name("hvdrun"), *arguments],
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": ""},
            stdin=self.inside,
            stdout=self.inside,
            stderr=self.inside,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def type(self, text):
        os.write(self.fd, text)

    def read_until(self, wanted, times=1):
        deadline = time.monotonic() + LIMIT_S
        while self.seen.count(wanted) < times:
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self.fd, 4096)
            except BlockingIOError:
                time.sleep(0.01)

    def code(self):
        """hvdrun's exit code; all that it has shown is in `seen`."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            self._read()
            time.sleep(0.01)
        self._read()
        return self.process.returncode

    def _read(self):
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fd, 4096):
                self.seen += data

    def close(self):
        if self.process is not None:
            end_tree(self.process)
        os.close(self.inside)
        os.close(self.fd)
