"""What happens between the turns of contenders."""

import time
from typing import Any

PAUSE_S = 50e-6


def rest(comm: Any) -> None:
    """A barrier whose ranks sleep. Collective.

    A rank that is through early would keep its core busy in MPI's barrier, while the others still
    wait for threads of Gloo or for the kernel to deliver its packets, on the same core.
    """
    pending = comm.Ibarrier()
    while not pending.Test():
        time.sleep(PAUSE_S)
