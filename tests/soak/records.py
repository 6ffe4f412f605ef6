"""The soak's log: one line per job, and the sums at its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.soak.drawing import Job
from tests.soak.judging import Judgement


@dataclass
class Sums:
    jobs: int = 0
    clean: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    slow: int = 0

    def add(self, job: Job, judgement: Judgement) -> None:
        self.jobs += 1
        if job.fault.kind == "none":
            self.clean += 1
        else:
            self.faults[job.fault.kind] += 1
        self.named[job.fault.kind] += bool(judgement.named)
        self.wrong.update(text.partition(":")[0] for text in judgement.wrong)
        self.slow += judgement.slow
        if judgement.wrong:
            self.failed.append(job.number)

    def lines(self, grown: list[str]) -> list[str]:
        named = [
            f"{kind} {count} ({self.named[kind]} named)" if self.named[kind] else f"{kind} {count}"
            for kind, count in sorted(self.faults.items())
        ]
        wrong = ", ".join(f"{kind} {count}" for kind, count in sorted(self.wrong.items()))
        return [
            f"{self.jobs} jobs, {self.clean} of them without a fault",
            f"faults: {', '.join(named) or 'none'}",
            f"wrong: {wrong or 'nothing'}"
            + (f"; jobs {', '.join(map(str, self.failed))}" if self.failed else ""),
            f"ranks called late by --summary: {self.slow} (not judged: the machine is shared)",
            f"left: {self.wrong['left'] or 'nothing'}",
            *(f"grown: {line}" for line in grown or ["nothing"]),
        ]


def line_of(job: Job, judgement: Judgement, seconds: float) -> str:
    verdict = "ok"
    if judgement.wrong:
        verdict = f"WRONG: {judgement.wrong[0]}"
    elif judgement.named:
        verdict = f"ok, named in {len(judgement.named)} sentences"
    return f"{job.number:4} {seconds:6.1f} s  {job}: {verdict}"
