"""Hosts that are silent for a while; an hvdrun or a host agent that does not run for a while."""

import contextlib
import re
import signal
import time

import pytest

from tests.harness.busy import without_delays
from tests.rig.conftest import LIMIT_S, job

pytestmark = [pytest.mark.rig, pytest.mark.long]

HOSTS = "server1:1,server2:1"
# Each sum is right, and takes a message each way. The last line has the longest time of one.
LEARNING = """
import os, time
import torch, hvdlite as hvd
hvd.init()
size, rank = hvd.size(), hvd.rank()
steps = torch.arange(5000.0)
hvd.allreduce(steps)
print("up", flush=True)
while {is_idle} and not os.path.exists({go!r}):
    time.sleep(0.1)
longest_s, over, last = 0.0, False, time.monotonic()
while not over:
    total = hvd.allreduce(steps * size + rank, op=hvd.Sum)
    assert torch.equal(total, steps * size * size + size * (size - 1) // 2), total
    over = hvd.allreduce(torch.tensor([int(os.path.exists({go!r}))]), op=hvd.Max).item()
    longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
    time.sleep(0.01)
print("right for", longest_s, flush=True)
"""


@contextlib.contextmanager
def learning(rig, python, *options, within=None, is_idle=False):
    """A job on two hosts that goes on until it is told to end."""
    go = rig.share / "go"
    go.unlink(missing_ok=True)
    hvdrun = within or rig.inside("server1", python.with_name("hvdrun"), "-H", HOSTS)
    program = LEARNING.format(go=str(go), is_idle=is_idle)
    with job([*hvdrun, *options, python, "-c", program], ranks=2) as process:
        yield Learning(rig, go, process)


class Learning:
    """Such a job, once its ranks are up."""

    def __init__(self, rig, go, process):
        self.rig, self.go, self.process = rig, go, process

    def without(self, host, words, for_s):
        """The processes on the host with these words in their command do not run for some time."""
        found = [p for at, p in self.rig.members() if at == host and words(p.cmdline())]
        assert found
        for process in found:
            process.send_signal(signal.SIGSTOP)
        time.sleep(for_s)
        for process in found:
            process.send_signal(signal.SIGCONT)

    def ends(self):
        """Its exit code, each rank's longest step in seconds, and what hvdrun said."""
        self.go.touch()
        out, said = self.process.communicate(timeout=LIMIT_S)
        said = without_delays(said)
        self.rig.assert_nothing_left()
        return self.process.returncode, [float(line.split()[-1]) for line in out.splitlines()], said


def hvdrun(words):
    return len(words) > 1 and words[1].endswith("bin/hvdrun")


def host_agent(words):
    return "host" in words and any(word.endswith("agent.py") for word in words)


QUIET = (
    r"hvdrun: server2 has given no sign of life for \d+ s; the job ends if it stays silent for 30 s"
)


def test_a_link_that_was_down_costs_a_job_nothing_but_time(rig, python):
    down_s = 20
    with learning(rig, python) as running:
        rig("cut", "server2")
        time.sleep(down_s)
        rig.restore()
        code, longest_s, said = running.ends()
    assert code == 0, said
    assert min(longest_s) > down_s - 1
    first, second = said.splitlines()
    assert re.match(QUIET, first)
    assert second.startswith("hvdrun: server2 is back after ")


@pytest.mark.wide
def test_connections_that_were_idle_during_a_cut_work_after_it(rig, python):
    """MPI looks after them itself, if it is not told otherwise."""
    with learning(rig, python, is_idle=True) as running:
        rig("cut", "server2")
        time.sleep(22)
        rig.restore()
        time.sleep(5)
        code, _, said = running.ends()
    assert code == 0, said


@pytest.mark.wide_in("mpich")
def test_an_hvdrun_that_was_stopped_blames_nobody(rig, python):
    """For longer than hosts may be silent when it is not."""
    with learning(rig, python, "--host-timeout", "20") as running:
        running.without("server1", hvdrun, 8)
        time.sleep(3)
        code, longest_s, said = running.ends()
    assert code == 0, said
    assert max(longest_s) < 8
    assert re.match(r"hvdrun: hvdrun itself did not run for \d+ s", said)
    assert len(said.splitlines()) == 1


@pytest.mark.wide_in("openmpi")
def test_hosts_that_end_their_ranks_while_hvdrun_is_stopped_say_why(rig, python):
    with learning(rig, python, "--host-timeout", "3") as running:
        running.without("server1", hvdrun, 8)
        code, _, said = running.ends()
    assert code == 72, said
    assert "server2 has ended its ranks, as it heard nothing from hvdrun for 3 s" in said
    was_stopped = r"hvdrun itself did not run for \d+ s: it was stopped, or its machine was"
    assert re.search(was_stopped, said)


@pytest.mark.wide_in("openmpi")
def test_a_host_agent_that_was_stopped_goes_on(rig, python):
    with learning(rig, python) as running:
        running.without("server2", host_agent, 8)
        time.sleep(2)
        code, longest_s, said = running.ends()
    assert code == 0, said
    assert max(longest_s) < 8
    first, second = said.splitlines()
    assert re.match(QUIET, first)
    assert second.startswith("hvdrun: server2 is back after ")
