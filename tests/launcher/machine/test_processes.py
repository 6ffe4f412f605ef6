"""What ranks leave in the background is found, and nothing else."""

import os
import subprocess
import sys

LEAVES_THINGS_BEHIND = """
import os, subprocess
from hvdrun.machine.processes import kill_descendants, kill_strays, set_subreaper

set_subreaper()
mpi = subprocess.Popen(["sleep", "60"])
marked = {**os.environ, "HVDRUN_KEEPER": "1"}
rank = subprocess.Popen(
    ["sh", "-c", "setsid sleep 60 >&2 & echo $!"], env=marked, stdout=subprocess.PIPE, text=True
)
stray = int(rank.communicate()[0])
kill_strays()
_, status = os.waitpid(stray, 0)
print(os.waitstatus_to_exitcode(status), mpi.poll())
kill_descendants()
"""


def test_what_a_rank_left_behind_is_killed_and_mpi_is_not():
    bystander = subprocess.Popen(["sleep", "60"], env={**os.environ, "HVDRUN_KEEPER": "1"})
    try:
        done = subprocess.run(
            [sys.executable, "-c", LEAVES_THINGS_BEHIND], capture_output=True, text=True, timeout=20
        )
        assert done.stdout == "-9 None\n", done
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
