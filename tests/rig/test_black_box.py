"""Several hosts: what the ranks of each did last reaches hvdrun, also of those that were killed."""

import json

import pytest

pytestmark = [pytest.mark.rig, pytest.mark.long]

KILLED = """
import os, signal, time
import torch, hvdlite as hvd
from hvdlite.world import world
hvd.init()
for _ in range(3):
    hvd.allreduce(torch.ones(3), name="loss")
if hvd.rank() == 2:
    while not all(os.path.exists(f"{go}.{{rank}}") for rank in (0, 1, 3)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
engine = world.current().team.engine
engine.record(10)
handle = hvd.allreduce_async(torch.ones(3), name="loss")
while not engine.drain_events()[0]:  # the engine has seen it
    time.sleep(0.001)
open(f"{go}.{{hvd.rank()}}", "w").close()
hvd.synchronize(handle)
"""


@pytest.mark.wide_in("mpich")
def test_the_last_operations_come_from_all_hosts(hvdrun, rig):
    logs = rig.share / "logs"
    command = ("python", "-c", KILLED.format(go=rig.share / "go"))
    for path in rig.share.glob("go*"):
        path.unlink()
    done = hvdrun("-H", "server1:2,server2:2", "--output-dir", logs, *command)
    assert done.code == 137, done
    assert (
        "hvdrun: the last operation that ranks 0-3 have all ended is allreduce 'loss' (no. 3)\n"
        "    ranks 0-1,3 went on to allreduce 'loss' (no. 4), which rank 2 has not called\n"
        "    rank 2 called no operation after that\n"
    ) in done.stderr, done
    for rank in range(4):
        text = (logs / f"black-box/rank.{rank}.jsonl").read_text()
        last = json.loads(text.splitlines()[-1])
        assert last["round"] == (3 if rank == 2 else 4), (rank, last)
