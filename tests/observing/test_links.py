"""How many bytes each rank says that it has sent to each other host, by the schedules."""

import os
import socket

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.observe import links
from hvdlite.world import world as worlds

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


def test_a_link_counts_from_when_it_was_looked_at():
    begin = links.Traffic({1: 5, 2: 7}, {("a", "b"): (10, 1.0), ("a", "c"): (10, 1.0)})
    end = links.Traffic({1: 8, 2: 7}, {("a", "b"): (30, 1.5), ("a", "c"): (4, 0.5)})
    assert links.sent_between(begin, end) == ((1, 3),)
    # The second was closed, and opened again.
    assert links.connections_between(begin, end) == (("a", "b", 20, 0.5), ("a", "c", 4, 0.5))


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
