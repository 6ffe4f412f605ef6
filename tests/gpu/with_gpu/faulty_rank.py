"""One rank of a job in which rank 1 does what the command line says, at its 30th reduction.

It prints its process number. `check_faults` starts it under hvdrun.
"""

import os
import signal
import sys
import time

import torch

import hvdlite as hvd
from tests.gpu.with_gpu.checking import DEVICE, start

STEPS = 60


def go_wrong(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "sleeping":
        time.sleep(600)
    elif how == "raising":
        raise RuntimeError("rank 1 gives up")
    elif how == "leaving":
        sys.exit(7)


start()
print(f"process {os.getpid()}", flush=True)
for i in range(STEPS):
    is_culprit = i == 30 and hvd.rank() == 1
    if is_culprit:
        go_wrong(sys.argv[1])
    count = 999 if is_culprit and sys.argv[1] == "disagreeing" else 1000
    hvd.allreduce_(torch.ones(count, device=DEVICE), name="gradient")
