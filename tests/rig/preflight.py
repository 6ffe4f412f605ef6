"""What the tests of hvdrun's check of its hosts share: their hosts, and the table it prints."""

import re

import pytest

BOTH = "server1:1,server2:1"
ALL = "server1:1,server2:1,server3:1"
# Where hvdrun ends before an MPI starts, or its MPI makes no difference.
UNDER_ONE_MPI = pytest.mark.parametrize("python", ["mpich"], indirect=True)


def only_finding(done, host="server2"):
    """(what was checked, what was found, the remedy) on the only line of the table."""
    said = [line for line in done.stderr.splitlines() if "hvdrun: waiting " not in line]
    summary, _, _, *lines = said
    waited = r"( after \d+ s \(--start-timeout\))?"
    assert re.fullmatch(
        rf"hvdrun: 1 of \d hosts is not ready{waited}, and nothing was started", summary
    )
    assert len(lines) == 1, done
    named, what, verdict, *rest = re.split(r"  +", lines[0].strip())
    assert (named, verdict) == (host, "failed"), done
    assert done.stdout == ""
    return what, *rest
