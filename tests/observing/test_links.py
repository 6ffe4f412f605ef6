"""How many bytes each rank says that it has sent to each other host, by the schedules."""

import os
import resource
import socket
import subprocess
import sys

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.observe import links
from hvdlite.observe.links import Counts
from hvdlite.world import world as worlds
from hvdrun.records import LEAST_BUSY_S, LEAST_OF_A_STEP
from tests.harness.compiled import linked

pytestmark = pytest.mark.ranks

ELEMS = 60 * 1024  # of 4 bytes: every part of it is large enough for messages of its own


def sent_in(what):
    """What this rank's engine has sent meanwhile, by the lowest rank of each other host."""
    hvd.init()
    earlier = sum(links.read().sent.values())
    collective = {
        "allreduce": lambda: hvd.allreduce(torch.ones(ELEMS), name="x"),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(ELEMS), name="x"),
        "allgather": lambda: hvd.allgather(torch.ones(ELEMS), name="x"),
        "broadcast": lambda: hvd.broadcast(torch.ones(ELEMS), 0, name="x"),
        "alltoall": lambda: hvd.alltoall(torch.ones(ELEMS), name="x"),
        "tiny": lambda: hvd.allreduce(torch.ones(3), name="x"),
    }[what]
    hvd.barrier()
    before = links.read()
    collective()
    hvd.barrier()
    found = dict(links.sent_between(before, links.read()))
    data_bytes = worlds.current().team.engine.counters()["data_bytes"]
    assert sum(links.read().sent.values()) - earlier == data_bytes
    if not (child := os.fork()):
        os._exit(hvd.metrics()["sent"] != [])
    assert os.waitpid(child, 0)[1] == 0
    hvd.shutdown()
    return found


WHOLE, THIRD, HALF = 4 * ELEMS, 4 * ELEMS // 3, 2 * ELEMS


# By the rank that sends and the host, given by its lowest rank.
@pytest.mark.hosts("1,1,1")
@pytest.mark.parametrize(
    ("what", "algorithm", "expected"),
    [
        ("allreduce", "ring", [{1: 4 * THIRD}, {2: 4 * THIRD}, {0: 4 * THIRD}]),
        (
            "allreduce",
            "direct",
            [
                {1: 2 * THIRD, 2: 2 * THIRD},
                {0: 2 * THIRD, 2: 2 * THIRD},
                {0: 2 * THIRD, 1: 2 * THIRD},
            ],
        ),
        ("allgather", "ring", [{1: 2 * WHOLE}, {2: 2 * WHOLE}, {0: 2 * WHOLE}]),
        ("broadcast", "ring", [{1: WHOLE}, {2: WHOLE}, {}]),
        ("alltoall", "ring", [{1: THIRD, 2: THIRD}, {0: THIRD, 2: THIRD}, {0: THIRD, 1: THIRD}]),
        ("tiny", "ring", [{}, {}, {}]),
    ],
)
def test_the_bytes_to_each_host_are_those_of_the_schedule(world, what, algorithm, expected):
    assert world.run(sent_in, what, knobs={"HVDLITE_ALGORITHM": algorithm}) == expected


@pytest.mark.hosts("2,1")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        # One rank of each host sends what the host has added up: half, and then a half's sum.
        ("allreduce", [{2: WHOLE}, {}, {0: WHOLE}]),
        # Both ranks of a host have a part for the other host, and nothing for each other here.
        ("alltoall", [{2: THIRD}, {2: THIRD}, {0: 2 * THIRD}]),
    ],
)
def test_what_stays_within_a_host_does_not_count(world, what, expected):
    assert world.run(sent_in, what, knobs={"HVDLITE_ALGORITHM": "ring"}) == expected


def sent_over_worlds():
    """In thirds, in two worlds, and in each by a process set that is removed."""
    hvd.init()
    before = links.read()
    for _ in range(2):
        hvd.init()
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            hvd.allreduce(torch.ones(ELEMS), name="x", process_set=pair)
        hvd.remove_process_set(pair)
        hvd.allreduce(torch.ones(ELEMS), name="x")
        hvd.barrier()
        latest = links.read()
        hvd.shutdown()
    # What making a process set takes is a few bytes more.
    return {to: round(count / THIRD, 2) for to, count in links.sent_between(before, latest)}


@pytest.mark.hosts("1,1,1")
def test_what_a_closed_engine_has_sent_stays_counted(world):
    expected = [{1: 2 * (3 + 4)}, {0: 2 * 3, 2: 2 * 4}, {0: 2 * 4}]
    knobs = {"HVDLITE_ALGORITHM": "ring", "HVDLITE_DYNAMIC_PROCESS_SETS": "1"}
    assert world.run(sent_over_worlds, knobs=knobs) == expected


AB, AC = ("a", "b", 1), ("a", "c", 9)


def looks(*seen, steps=(0, 0, 0)):
    """What is known after each look at these connections, and after so many steps."""
    sums, found = links.Sums(), []
    for connections, made in zip(seen, steps, strict=False):
        sums.steps = made
        found.append(links.Traffic({}, connections or {}, sums.look(connections)))
    return found


def test_a_link_counts_from_when_it_was_looked_at():
    begin, end = looks(
        {AB: Counts(10, 1.0), AC: Counts(10, 1.0)}, {AB: Counts(30, 2.0), AC: Counts(4, 0.5)}
    )
    begin, end = begin._replace(sent={1: 5, 2: 7}), end._replace(sent={1: 8, 2: 7})
    assert links.sent_between(begin, end) == ((1, 3),)
    # Of the second, an old kernel tells only the ports: it was closed, and opened again.
    expected = (("a", "b", 20, 1.0, 20.0), ("a", "c", 4, 0.5, 8.0))
    assert links.connections_between(begin, end, 0) == expected


def test_each_connection_between_two_addresses_counts_by_itself():
    """The second was busier until now, the third is closed, the fourth is new."""
    keys = [("a", "b", number) for number in range(4)]
    earlier = [Counts(1000, 1.0), Counts(9000, 9.0), Counts(10**6, 99.0)]
    counts = [Counts(1000 + 600, 1.0 + 2.0), Counts(9000 + 50, 9.0 + 0.5), None, Counts(400, 1.0)]
    now = {key: count for key, count in zip(keys, counts, strict=True) if count}
    begin, end = looks(dict(zip(keys, earlier, strict=False)), now)
    (found,) = links.connections_between(begin, end, 0)
    # Their bytes together, the busiest one's seconds, and the fastest one's rate.
    assert found == ("a", "b", 600 + 50 + 400, 2.0, 400.0)


def test_small_messages_are_counted_and_tell_no_rate():
    enough, steps = LEAST_OF_A_STEP, 10
    seen = {
        ("a", "b", 1): Counts(steps * enough, 2.0),
        ("a", "b", 2): Counts(steps * enough - 1, 3.0),
    }
    begin, end = looks({}, seen, steps=(0, steps))
    (found,) = links.connections_between(begin, end, steps)
    assert found == ("a", "b", 2 * steps * enough - 1, 2.0, steps * enough / 2.0)
    begin, end = looks({}, {AB: Counts(steps * enough, 0.9 * LEAST_BUSY_S)}, steps=(0, steps))
    (found,) = links.connections_between(begin, end, steps)
    assert found == ("a", "b", steps * enough, 0.9 * LEAST_BUSY_S, 0.0)


def test_what_trickles_into_a_full_window_makes_no_rate_higher():
    """The peer had no room in 3 of the 4 busy seconds, and 4000 bytes went in all of them."""
    begin, end = looks({AB: Counts(1000, 1.0, 0.5)}, {AB: Counts(5000, 5.0, 3.5)})
    assert links.connections_between(begin, end, 0) == (("a", "b", 4000, 1.0, 1000.0),)


MUCH = 1 << 30
OTHER = ("a", "b", 2)


@pytest.mark.parametrize(
    ("seen", "carried"),
    [
        pytest.param(
            [{AB: Counts(MUCH, 4.0), OTHER: Counts(MUCH, 3.0)}, {OTHER: Counts(MUCH + 5, 3.0)}],
            [(2 * MUCH, 4.0), (2 * MUCH + 5, 4.0)],
            id="the busier of two is closed",
        ),
        pytest.param(
            [{AB: Counts(MUCH, 4.0)}, {}, {OTHER: Counts(MUCH, 2.0)}],
            [(MUCH, 4.0), (MUCH, 4.0), (2 * MUCH, 6.0)],
            id="another one comes after it",
        ),
        pytest.param(
            [{AB: Counts(MUCH, 4.0)}, {AB: Counts(MUCH + 5, 4.1)}],
            [(MUCH, 4.0), (MUCH + 5, 4.0)],
            id="later messages are small",
        ),
        pytest.param(
            [{AB: Counts(MUCH, 4.0)}, None, {AB: Counts(9 * MUCH, 7.0)}],
            [(MUCH, 4.0), (MUCH, 4.0), (9 * MUCH, 7.0)],
            id="no descriptor is free for a look",
        ),
    ],
)
def test_what_was_carried_never_falls(seen, carried):
    begin, *found = looks({}, *seen, steps=(0, 10, 10**4, 10**4 + 10))
    known = [links.connections_between(begin, each, 10)[0] for each in found]
    assert [(each.bytes, each.busy) for each in known] == carried


def test_between_two_steps_a_look_ends_no_stretch():
    """A part of a step's messages is no small message, and what is closed meanwhile counts."""
    begin, _, end = looks(
        {AB: Counts(0, 0.0)},
        {AB: Counts(LEAST_OF_A_STEP // 2, 1.0), OTHER: Counts(LEAST_OF_A_STEP, 3.0)},
        {AB: Counts(LEAST_OF_A_STEP, 2.0)},
        steps=(1, 1, 2),
    )
    (found,) = links.connections_between(begin, end, 1)
    assert found == ("a", "b", 2 * LEAST_OF_A_STEP, 3.0, LEAST_OF_A_STEP / 2.0)


def test_without_a_free_descriptor_there_are_no_connections():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = links.open_connections()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found is None


def test_a_connection_within_this_host_and_what_is_none_are_no_links():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as end,
        server.accept()[0] as other,
        open("/dev/null") as file,
    ):
        end.sendall(b"x")
        assert other.recv(1) == b"x"  # it is acknowledged
        found = [_core.tcp_connection(each.fileno()) for each in (end, server, file)]
    assert found == [None] * 3
    assert _core.tcp_connection(-1) is None
    with pytest.raises(TypeError):
        _core.tcp_connection("x")


# While it pretends, sockets have addresses of two hosts. With `other`, a descriptor, the next look
# at a peer's address finds the number used for another connection, as by another thread.
STANDS_IN = """
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int pretends, other = -1;

static int give(long call, int fd, struct sockaddr *to, socklen_t *bytes, const char *address)
{
    int err = (int)syscall(call, fd, to, bytes);
    if (!err && pretends)
        inet_pton(AF_INET, address, &((struct sockaddr_in *)to)->sin_addr);
    return err;
}

int getsockname(int fd, struct sockaddr *to, socklen_t *bytes)
{
    return give(SYS_getsockname, fd, to, bytes, "10.0.0.1");
}

int getpeername(int fd, struct sockaddr *to, socklen_t *bytes)
{
    if (pretends && other >= 0)
        dup2(other, fd);
    return give(SYS_getpeername, fd, to, bytes, "10.0.0.2");
}
"""

LOOKS = """
import ctypes, os, socket
from hvdlite import _core

stands_in = ctypes.CDLL(os.environ["LD_PRELOAD"])
server = socket.create_server(("127.0.0.1", 0))
ends, others = [], []
for count in (5, 7):
    ends.append(socket.create_connection(server.getsockname()))
    others.append(server.accept()[0])
    ends[-1].sendall(bytes(count))
    assert len(others[-1].recv(9)) == count
    others[-1].sendall(b"x")
    assert ends[-1].recv(1) == b"x"  # and with it an acknowledgement
ctypes.c_int.in_dll(stands_in, "pretends").value = 1
first, second = (_core.tcp_connection(end.fileno()) for end in ends)
assert first[:2] == second[:2] == ("10.0.0.1", "10.0.0.2")
assert second[3] - first[3] == 7 - 5
assert first[2] != second[2]
assert first[:4] == _core.tcp_connection(ends[0].fileno())[:4]
ctypes.c_int.in_dll(stands_in, "other").value = ends[1].fileno()
assert _core.tcp_connection(ends[0].fileno()) is None
assert second[:4] == _core.tcp_connection(ends[0].fileno())[:4]

# Nobody reads more of it: the window fills up, and the time in which it is full is part of busy.
ctypes.c_int.in_dll(stands_in, "other").value = -1
ends[1].setblocking(False)
full = 0.0
while not full:
    try:
        ends[1].send(bytes(1 << 20))
    except BlockingIOError:
        pass
    *_, busy, full = _core.tcp_connection(ends[1].fileno())
assert busy >= full > 0
"""


def test_a_descriptor_that_another_thread_uses_anew_meanwhile_is_left_out(tmp_path):
    source = tmp_path / "stands_in.c"
    source.write_text(STANDS_IN)
    library = linked(tmp_path / "stands_in.so", [source], "-shared", "-fPIC")
    preloaded = {**os.environ, "LD_PRELOAD": str(library)}
    subprocess.run([sys.executable, "-c", LOOKS], env=preloaded, check=True)
