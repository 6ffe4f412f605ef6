"""A host that is cut off under plain mpirun, which says nothing of it for minutes: the ranks do."""

import re

import pytest

from tests.rig.conftest import job

pytestmark = [pytest.mark.rig, pytest.mark.long]

# Of so many names both hosts are the coordinator of some.
JOB = """
import os, sys, time
os.environ["HVDLITE_STALL_CHECK_TIME_SECONDS"] = "2"
os.environ["HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"] = "10"
import torch, hvdlite as hvd
hvd.init()
hvd.allreduce(torch.ones(3))
print("up", flush=True)
if hvd.rank() != {waits}:
    time.sleep(40)
    os._exit(0)
while not os.path.exists({go!r}):
    time.sleep(0.01)
handles = [hvd.allreduce_async(torch.ones(3), name=f"late {{i}}") for i in range(12)]
try:
    hvd.synchronize(handles[0])
except hvd.HorovodInternalError as error:
    print("failed:", error, file=sys.stderr, flush=True)
    print("over", file=sys.stderr, flush=True)
    time.sleep(40)
os._exit(0)
"""


def mpirun(python, hosts, *command):
    program = python.with_name("mpirun")
    if python.parents[1].name == ".venv":
        places = ",".join(f"{host}:1" for host in hosts)
        return [program, "--allow-run-as-root", "--host", places, *command]
    return [program, "-hosts", ",".join(hosts), "-ppn", "1", "-np", "2", *command]


@pytest.mark.parametrize("first", ["server1", "server2"])
def test_a_host_that_is_cut_off_is_reported_and_ends_the_wait(rig, python, first):
    """The rank on server1 waits for server2, which may be the host that decides that all fails."""
    go = rig.share / "go"
    go.unlink(missing_ok=True)
    hosts = sorted(("server1", "server2"), reverse=first == "server2")
    text = JOB.format(go=str(go), waits=hosts.index("server1"))
    said = []
    with job(rig.inside("server1", *mpirun(python, hosts, python, "-c", text))) as process:
        shown = ""  # mpirun may put both ranks' words into one line
        while shown.count("up") < 2:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            shown += line
        rig("cut", "server2")
        go.touch()
        for line in process.stderr:
            said.append(line.rstrip())
            if line.endswith("over\n"):
                break
    waited = r"\(<string>:\d+\) has waited \d+ s for server2, which does not answer"
    for i in range(12):
        assert any(re.search(f"hvdlite: allreduce 'late {i}' {waited}", line) for line in said), (
            said
        )
    assert any(re.search(f"failed: allreduce 'late \\d+' {waited}", line) for line in said), said


LOST = """
import sys, time
import torch, hvdlite as hvd

def load():
    time.sleep(60)

hvd.init()
hvd.barrier()
if hvd.rank() == {rank}:
    load()
hvd.allreduce(torch.ones(3), name="loss")
"""


# The operation's coordinator, which makes the report, is on the first host or on the second.
@pytest.mark.parametrize("rank", [0, 3])
def test_hvdrun_shows_where_the_ranks_of_all_hosts_are(rig, hvdrun, python, rank):
    script = rig.share / "lost.py"
    script.write_text(LOST.format(rank=rank).lstrip())
    limits = ("--stall-check-warning-time-seconds", "3")
    limits += ("--stall-check-shutdown-time-seconds", "9")
    done = hvdrun("-H", "server1:2,server2:2", *limits, python, script)
    assert done.code == 1, done
    others = "1-3" if rank == 0 else "0-2"
    assert re.search(
        r"hvdrun: where the ranks are that allreduce 'loss' \(lost.py:11\) waits for, "
        r"and those in it:\n"
        rf"    rank {rank} on server[12] sleeps: python {script} \(process \d+\)\n"
        rf"        {script}:5 in load\n        {script}:10 in <module>\n"
        rf"    ranks {others} on server1, server2\n"
        r"        hvdlite/collectives/allreduce.py:\d+ in allreduce\n"
        rf"        {script}:11 in <module>\n",
        done.stderr,
    ), done
