"""hvdrun's end of a connection to another host."""

import os
import selectors
import socket

import pytest

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
