"""What the stall check says of a send or receive without its other side."""

import re

import pytest
import torch

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.observing.reports import FAILS, WARNS, Said


def late(what):
    """Rank 1's side comes after rank 0's is reported."""
    hvd.init()
    said = Said()
    engine = worlds.current().team.engine
    x = torch.zeros(3)
    if hvd.rank() == 0:
        sides = {
            "recv": lambda: engine.recv(x, 1, 4, "train.py:12"),
            "any": lambda: engine.recv(x, -1, 4, "train.py:12"),
            "send": lambda: engine.send(x, 1, 4, "train.py:12"),
        }
        operation = sides[what]()
    name = {
        "recv": "recv from rank 1 with tag 4",
        "any": "recv from any rank with tag 4",
        "send": "send to rank 1 with tag 4",
    }[what]
    (line,) = said.wait_for(name)[:1]
    if hvd.rank() == 1:
        operation = engine.recv(x, 0, 4) if what == "send" else engine.send(x, 0, 4)
    if hvd.rank() < 2:
        assert operation.wait() is None
    said.wait_for_line(f"hvdlite: {name} goes on")
    return line


WAITED = {
    "recv": r"recv from rank 1 with tag 4 has waited \d s for rank 1 on \S+, which has not called "
    r"send to rank 0 with this tag",
    "any": r"recv from any rank with tag 4 has waited \d s for a rank that calls send to rank 0 "
    r"with this tag",
    "send": r"send to rank 1 with tag 4 has waited \d s for rank 1 on \S+, which has not called "
    r"recv from rank 0 with this tag",
}


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("what", WAITED)
def test_a_message_without_its_other_side_is_reported(world, what):
    end = r"; called by rank 0 at train\.py:12; do both ranks name each other, and the same tag\?"
    for line in world.run(late, what, knobs=WARNS):
        assert re.fullmatch("hvdlite: " + WAITED[what] + end, line), line


def never(rank):
    hvd.init()
    engine = worlds.current().team.engine
    if hvd.rank() == rank:
        return engine.recv(torch.zeros(3), 1 - rank, 4).wait()
    return engine.recv(torch.zeros(3), hvd.rank(), 5).wait()


@pytest.mark.ranks(2)
def test_after_the_time_for_a_shutdown_everything_fails(world):
    for text in world.run(never, 0, knobs=FAILS):
        assert re.match(r"recv from rank \d with tag \d has waited \d s for rank \d on ", text)
        assert text.endswith("all operations fail now (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS)")
