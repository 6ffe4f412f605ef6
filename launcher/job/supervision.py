"""How the user wants a job to be watched, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from hvdrun.agent.silence import HOST_TIMEOUT_S
from hvdrun.plan.schedulers.scheduler import Requeue

ONE_ACT_S = 0.05
# If each host runs an hvdrun that passes its signals on to the first one.
ONE_ACT_OF_MANY_S = 5.0


@dataclass(frozen=True)
class Supervision:
    start_timeout_s: float  # how long all ranks may take to start
    verbose: bool = False  # shows mpirun's output at once, also while the job is being ended
    host_timeout_s: float = HOST_TIMEOUT_S  # how long a host may be silent
    grace_s: float | None = None  # for the ranks, after any signal to hvdrun; None: see `ending`
    # The same signal twice within this time is one act, but for Ctrl-C. Wrappers (timeout, uv run)
    # pass on what they or the whole process group have got; platforms signal all hosts of a job.
    one_act_s: float = ONE_ACT_S
    requeue: Requeue | None = None  # if the batch scheduler is to run a preempted job again
