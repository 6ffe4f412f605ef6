"""`hvdlite.run` over several hosts."""

import pytest

from tests.harness.programs import run_program

pytestmark = pytest.mark.rig

LIMIT_S = 60.0
PROGRAM = """
import os
import hvdlite as hvd


def where(letter):
    hvd.init()
    return hvd.rank(), os.uname().nodename, letter * 100_000


def fails():
    hvd.init()
    if hvd.rank() == 1:
        raise KeyError(os.uname().nodename)
    hvd.barrier()


if __name__ == "__main__":
    results = hvd.run(where, ("x",), num_proc=2, hosts="server2:1,server3:1")
    print([(rank, host, len(text)) for rank, host, text in results])
    try:
        hvd.run(fails, num_proc=2, hosts="server1:1,server3:1")
    except hvd.RankError as error:
        print(error.rank, error.host, repr(error.__cause__))
"""


@pytest.mark.wide
def test_results_and_exceptions_come_from_other_hosts(rig, python):
    (rig.share / "where.py").write_text(PROGRAM)
    done = run_program(rig.inside("server1", python, rig.share / "where.py"), LIMIT_S)
    assert done.stdout.splitlines()[-2:] == [
        "[(0, 'server2', 100000), (1, 'server3', 100000)]",
        "1 server3 KeyError('server3')",
    ], done
