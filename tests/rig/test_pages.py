"""docs/launching/several-hosts.md: the command lines in it run, on server1 as the page says."""

import re

import pytest

from tests.harness.programs import run_program
from tests.launcher.test_pages import SCRIPT, blocks, commands

pytestmark = pytest.mark.rig

LIMIT_S = 60.0
# The number of ranks of each command that starts some.
RANKS = {"-np 3": 3, ":2,server2:2": 4, ":1,server2:1": 2, "hosts.txt": 4}


@pytest.mark.parametrize("line", commands("several-hosts.md"))
@pytest.mark.wide
@pytest.mark.parametrize("python", ["openmpi"], indirect=True)
def test_the_commands_for_two_servers_run(line, rig, python):
    (hostfile,) = blocks("several-hosts.md", "text")
    (rig.share / "hosts.txt").write_text(hostfile)
    (rig.share / "train.py").write_text(SCRIPT)
    command = f"cd {rig.share} && {line.replace('hvdrun', f'{python} -m hvdrun', 1)}"
    done = run_program(rig.inside("server1", "sh", "-c", command), LIMIT_S)
    assert done.code == 0, done
    if "--check" not in line and "--dry-run" not in line:
        ranks = next(count for part, count in RANKS.items() if part in line)
        assert len(re.findall(rf"size {ranks}$", done.stdout, re.MULTILINE)) == ranks, done
