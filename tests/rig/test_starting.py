"""Ranks on two hosts that wait for one in hvd.init(), and one that closes MPI's descriptors."""

import re

import pytest

pytestmark = [pytest.mark.rig, pytest.mark.long]

HOSTS = ("-H", "server1:2,server2:2")

LEAVES = """
import os, sys
if os.environ["RANK"] == "2":
    sys.exit(0)
import hvdlite as hvd
hvd.init()
"""


def test_a_rank_on_another_host_that_ends_with_0_before_init_is_named(hvdrun, python):
    done = hvdrun(*HOSTS, python, "-c", LEAVES)
    assert done.code == 73, done
    assert re.search(
        r"hvdrun: rank 2 on server2 ended with exit code 0 after [\d.]+ s and had not called"
        r" hvd.init\(\), where ranks? [013,-]+ waited for it",
        done.stderr,
    ), done


LATE = """
import os, time
if os.environ["RANK"] == "2":
    time.sleep(8)
import hvdlite as hvd
hvd.init()
"""


def test_hvdrun_asks_another_host_what_a_rank_does_that_is_late_for_init(hvdrun, python):
    done = hvdrun(*HOSTS, "--stall-check-warning-time-seconds", "2", python, "-c", LATE)
    assert done.code == 0, done
    assert re.search(
        r"hvdrun: ranks? [013,-]+ waits? in hvd.init\(\) for ranks? [0-3,-]+, which ha(s|ve) not"
        r" called it \([\d.]+ s so far\):\n(    rank .*\n)*    rank 2 on server2"
        r" (sleeps|computes).*python",
        done.stderr,
    ), done
    assert "hvdrun: all ranks are in hvd.init(), after" in done.stderr


CLOSES = """
import os, time
import hvdlite as hvd, torch
hvd.init()
if hvd.rank() == 2:
    os.closerange(0, 1000)
    time.sleep(30)
for step in range(100):
    hvd.allreduce(torch.ones(1000), name="x")
    time.sleep(0.1)
"""


def test_a_rank_that_closes_its_file_descriptors_is_the_cause_of_what_others_die_of(hvdrun, python):
    done = hvdrun(*HOSTS, python, "-c", CLOSES)
    if done.code == 73:
        assert re.search(
            r"^hvdrun: rank 2 on server2 closed its file descriptors after [\d.]+ s, MPI's"
            r" connections to other ranks among them, and that ended the job \(rank \d on server1 ",
            done.stderr,
            re.MULTILINE,
        ), done
    else:  # MPICH's UCX may first find out on rank 2 itself
        _, found, after = done.stderr.partition("hvdrun: rank 2 on server2 was ended by SIGABRT")
        assert found, done
        assert "\nhvdrun: it had closed its file descriptors" in after, done
