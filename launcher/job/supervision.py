"""How the user wants a job to be watched, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdrun.plan.request import Request
from hvdrun.plan.schedulers.scheduler import Requeue
from hvdrun.reports.report_file import ReportFile

# The same signal twice within this time is one act: wrappers (timeout, uv run) pass on what they or
# the whole process group have got.
ONE_ACT_S = 0.05


@dataclass(frozen=True)
class Supervision:
    request: Request
    cwd: str = ""  # the ranks' folder: places in their code are named from there
    requeue: Requeue | None = None  # if the batch scheduler is to run a preempted job again
    report: ReportFile = field(default_factory=ReportFile)
