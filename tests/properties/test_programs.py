"""Random programs of collectives on several ranks come out as one process computes them.

`make test` plays some hundred, the same ones each time. `make test-properties PROGRAMS=20000` plays
many, from a random seed that it prints.
"""

import os
import zlib

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.properties.check import LIMIT_S, Broken, check
from tests.properties.strategies import programs
from tests.properties.validity import faults

# How many to play in each shape of the world with each set of knobs, and where to begin.
EACH = int(os.environ.get("HVDLITE_TEST_PROGRAMS", "20"))
SEED = int(os.environ.get("HVDLITE_TEST_SEED", "0"))

TINY = {
    "HVDLITE_INLINE_BYTES": "64",
    "HVDLITE_SEGMENT_BYTES": "256",
    "HVDLITE_BLOCK_BYTES": "256",
    "HVDLITE_PIECE_BYTES": "1024",
}
KNOBS = {
    "default knobs": {},
    "tiny knobs": TINY,
    "tiny and deterministic": {**TINY, "HVDLITE_DETERMINISTIC": "1"},
}


def each_program(strategy, examples, number, holds):
    """Calls `holds` with so many programs; the shortest one that it fails with is reported."""

    @settings(
        max_examples=examples,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @seed(number)
    @given(strategy)
    def each(program):
        holds(program)

    each()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_programs_are_valid(size):
    def is_valid(program):
        assert faults(program) == []

    each_program(programs(size), 100, SEED + size, is_valid)


@pytest.mark.wide_in("1,2", "2,2", "2,1,1")
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.hosts("1,1", "2,1", "1,2", "2,2", "1,1,1", "2,1,1")
@pytest.mark.timeout(300 + 2 * EACH)
@pytest.mark.parametrize("knobs", KNOBS)
def test_every_program_gives_what_one_process_computes(world, knobs):
    # A program that hangs costs its limit, and there are many on the way to the shortest one.
    limits_s = [LIMIT_S]

    def holds(program):
        try:
            check(world, program, KNOBS[knobs], limits_s[-1])
        except Broken:
            limits_s.append(5.0)
            raise

    name = f"{world.mpi} {world.hosts or world.size} {knobs}"
    # With the tiny ones a megabyte is thousands of messages.
    strategy = programs(world.size, large=not KNOBS[knobs])
    each_program(strategy, EACH, SEED + zlib.crc32(name.encode()), holds)
