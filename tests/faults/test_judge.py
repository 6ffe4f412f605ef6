"""Whom the judge of the table of faults takes for blamed."""

import pytest

from tests.faults.__main__ import FAULTS
from tests.faults.judge import wrong_names

SLOW = (
    "[1] hvdlite: allreduce 'x' has waited 4 s for server3, which does not answer; called by rank "
    "1; is that host cut off, or are its processes stopped? Or is the link between it and {} slow?"
)
LATE = "[2] hvdlite: allreduce 'x' has waited 2 s for {}; called by ranks 0, 2; do all"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (LATE.format("rank 1 on a (which last finished rank 0 3 s ago)"), []),
        (LATE.format("rank 0 on a (which last finished barrier 'y' 3 s ago)"), ["rank 0"]),
        (LATE.format("server2, which does not answer"), []),
        (LATE.format("server2, which does not answer, server3, which does"), ["server3"]),
        (SLOW.format("server2"), []),
        (SLOW.format("server1"), ["server3"]),
        ("hvdrun: ranks 0,2 wait in hvd.init() for ranks 1-2, which have not", ["rank 2"]),
        ("hvdrun: rank 2 on server3 was ended by SIGKILL (Killed) after 3 s", ["rank 2"]),
        ("hvdrun: ranks 1-2 on a, b arrive last in 90 % of steps, by 8 ms: x", ["rank 2"]),
        ("hvdrun: server3 is lost: its connection ended", ["server3"]),
        ("x is not the same on all ranks: rank 0 differs from ranks 1, 2", ["rank 0"]),
        ("    rank 2 on server3 sleeps: python train.py (process 7)", []),
    ],
)
def test_whoever_is_blamed_and_is_not_the_culprit_is_a_wrong_name(text, names):
    assert wrong_names(text, {"rank 1", "server2"}) == names


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_has_a_script_that_compiles_and_the_line_that_is_to_be_named(fault):
    compile(fault.script, "train.py", "exec")
    assert fault.line or "{line}" not in "".join(fault.says)
    assert len(fault.patterns(1)) == len(fault.patterns(3)) == len(fault.says)
