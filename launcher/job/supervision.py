"""How the user wants a job to be watched, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from hvdrun.agent.silence import HOST_TIMEOUT_S
from hvdrun.plan.schedulers.scheduler import Requeue

# The same signal twice within this time is one act: wrappers (timeout, uv run) pass on what they or
# the whole process group have got.
ONE_ACT_S = 0.05


@dataclass(frozen=True)
class Supervision:
    start_timeout_s: float  # how long all ranks may take to start
    verbose: bool = False  # shows mpirun's output at once, also while the job is being ended
    host_timeout_s: float = HOST_TIMEOUT_S  # how long a host may be silent
    grace_s: float | None = None  # for the ranks, after any signal to hvdrun; None: see `ending`
    of_nodes: bool = False  # each host runs an hvdrun, which passes its signals on to this one
    requeue: Requeue | None = None  # if the batch scheduler is to run a preempted job again
    metrics_file: str = ""  # the path; "": there is none
    cwd: str = ""  # the ranks' folder: places in their code are named from there
