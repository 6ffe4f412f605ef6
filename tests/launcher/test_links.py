"""hvdrun's end of a connection to another host."""

import os
import selectors
import socket

import pytest

from hvdrun.host_agent import split_ssh
from hvdrun.links import HostLink


@pytest.mark.parametrize("last_first", [False, True])
def test_a_connection_that_ends_with_words_on_stderr_may_be_closed_before_they_are_read(last_first):
    """Both are ready at once, and what is read first closes the other."""
    selector = selectors.DefaultSelector()
    near, far = socket.socketpair()
    reader, writer = os.pipe()
    closed = []
    link = HostLink(
        *("server9", near, reader, selector, lambda *_: None, lambda _: None, lambda _: None),
        closed.append,
    )
    os.write(writer, b"Connection refused\n")
    os.close(writer)
    far.close()
    ready = sorted(selector.select(1.0), key=lambda event: event[0].fd == reader)
    assert len(ready) == 2
    for key, _ in reversed(ready) if last_first else ready:
        key.data()
    assert closed == [link]
    assert link.errors == b"Connection refused\n"
    selector.close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a", "orted", "-x", "b"], ([], "a", ["orted", "-x", "b"])),
        (["-x", "a", "orted"], (["-x"], "a", ["orted"])),
        # As the MPI operator of Kubernetes has it set for Open MPI.
        (["-o", "ConnectionAttempts=10", "a"], (["-o", "ConnectionAttempts=10"], "a", [])),
        (["-oPort=3", "-p", "22", "a", "b"], (["-oPort=3", "-p", "22"], "a", ["b"])),
    ],
)
def test_options_that_mpi_gives_to_ssh_come_before_the_host(arguments, expected):
    assert split_ssh(arguments) == expected
