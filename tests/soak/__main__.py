"""`make soak MINUTES=30 SEED=…`, or with JOB=n one job of it."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.rig import lacking, shared_with_hosts
from tests.harness.worlds import ROOT, python_of
from tests.rig.conftest import Rig
from tests.soak import growth
from tests.soak.drawing import KINDS, MPIS, Job, draw
from tests.soak.judging import Judgement, judge
from tests.soak.records import Sums, line_of
from tests.soak.running import Running

# The long job has so much of the time.
LONG_SHARE = 0.2
LEAST_LONG_S = 30.0


@contextmanager
def hosts_up() -> Iterator[Rig]:
    """The hosts, with a cache of their own, so that hvdrun knows no others."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-soak-") as folder:
        share = Path(folder, "share")
        share.mkdir()
        rig = Rig(Path(folder, "cluster"), share)
        os.environ["XDG_CACHE_HOME"] = str(share / "cache")
        try:
            rig.up(*shared_with_hosts(share, ROOT, python_of("mpich").parents[1]))
            yield rig
        finally:
            rig("down")


def play(rig: Rig, job: Job, folder: Path) -> tuple[Judgement, float]:
    """Plays a job. If something is wrong, all that it printed stays in the folder."""
    kept = folder / f"job-{job.number}"
    played = Running(rig, job, kept).play()
    timeline = kept / "timeline"
    is_whole = job.timeline and job.fault.kind == "none"
    judgement = judge(job, played, timeline if is_whole else None)
    if judgement.wrong:
        text = [repr(job), str(job), f"exit codes {played.codes}, rounds {played.rounds}"]
        text += [*judgement.wrong, played.late]
        (kept / "wrong").write_text("\n".join(text))
    else:
        shutil.rmtree(kept)
    return judgement, played.seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 24))
    parser.add_argument("--job", type=int, help="only the job with this number")
    parser.add_argument("--kind", choices=KINDS, help="only jobs with this fault")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "soak")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the hosts go down
    if reason := lacking():
        print(reason, file=sys.stderr)
        return 2
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    sums, grown = Sums(), list[str]()
    with hosts_up() as rig, open(options.folder / "log", "w") as log:

        def tell(line: str) -> None:
            print(line, flush=True)
            print(line, file=log, flush=True)

        tell(f"SEED={options.seed}, {options.minutes:g} minutes, kept in {options.folder}")
        deadline = time.monotonic() + 60 * options.minutes
        number = options.job or 0
        if options.job is None and options.kind is None:
            seconds = max(LEAST_LONG_S, 60 * options.minutes * LONG_SHARE)
            mpi = MPIS[options.seed % len(MPIS)]
            found = growth.play(rig, mpi, seconds, options.folder / "growth")
            grown += found.grown
            tell(f"the long job, {mpi}: {found.laps} laps after the warm-up")
            for line in found.lines:
                tell(f"    {line}")
        while time.monotonic() < deadline:
            job = draw(options.seed, number, options.kind)
            judgement, seconds = play(rig, job, options.folder)
            sums.add(job, judgement)
            tell(line_of(job, judgement, seconds))
            number += 1
            if options.job is not None:
                break
        for line in sums.lines(grown):
            tell(line)
    return 1 if sums.failed or grown else 0


if __name__ == "__main__":
    sys.exit(main())
