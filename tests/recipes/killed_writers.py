"""Kills writers of checkpoints at random moments, and looks at what they leave.

    python -m tests.recipes.killed_writers FOLDER KILLS SEED

Each writer is a process that writes checkpoint after checkpoint, and notes in shared memory which
one is complete and what it is doing. Kills fall at a random time, or in a chosen phase: there at a
random time, or just before or after the phase, which is how a kill meets what takes microseconds.
Prints in which phases they fell.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import stat
import struct
import sys
import time
from typing import Any, NoReturn

import torch

from hvdlite.recipes.checkpoint_files import KEY, VERSION, BackgroundWriter, CheckpointFolder

KEEP = 3
ELEMS = 500_000
PHASES = ("between", "writing", "fsync", "rename", "fsync of the folder", "pruning")
LIMIT_S = 20.0


class Notes:
    """What the writer and the killer both see."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 24)

    def _get(self, place: int) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * place)[0])

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, value)

    phase = property(lambda self: self._get(0), lambda self, value: self._set(0, value))
    complete = property(lambda self: self._get(1), lambda self, value: self._set(1, value))
    begun = property(lambda self: self._get(2), lambda self, value: self._set(2, value))


def tree_of(step: int) -> dict[str, Any]:
    about = {"version": VERSION, "step": step, "generators": []}
    return {"model": torch.full((ELEMS,), float(step)), KEY: about}


def write_for_ever(path: str, first: int, notes: Notes, die: tuple[int, str] | None) -> NoReturn:
    """die: the phase, and whether "before" or "after" it, in which this process kills itself."""

    def noted(phase: int, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            mine = phase
            if function is former_fsync and stat.S_ISDIR(os.fstat(args[0]).st_mode):
                mine = PHASES.index("fsync of the folder")
            notes.phase = mine
            # In the third write, so that there is something to prune.
            ready = notes.begun - first >= KEEP
            if ready and die == (mine, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if ready and die == (mine, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
            notes.phase = 0
            return result

        return run

    former_fsync = os.fsync
    os.fsync = noted(PHASES.index("fsync"), os.fsync)
    os.rename = noted(PHASES.index("rename"), os.rename)
    os.unlink = noted(PHASES.index("pruning"), os.unlink)
    torch.save = noted(PHASES.index("writing"), torch.save)
    folder = CheckpointFolder(path, KEEP)
    folder.prepare()
    writer = BackgroundWriter(folder)
    step = first
    while True:
        notes.begun = step
        writer.start(step, tree_of(step))
        writer.wait()
        notes.complete = step
        step += 1


def wait_until(is_so: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, "the writer does not get there"


def kill_one(path: str, first: int, number: int, draw: random.Random) -> tuple[int, Notes]:
    """Starts a writer and kills it; the phase in which the kill fell."""
    notes = Notes()
    notes.complete = first - 1
    phase = 1 + number % (len(PHASES) - 1)
    how = draw.choice(["any time", "during", "before", "after"])
    die = (phase, how) if how in ("before", "after") else None
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(path, first, notes, die)
        finally:
            os._exit(1)
    if how == "any time":
        time.sleep(draw.uniform(0.0, 0.15))
    elif how == "during":
        wait_until(lambda: notes.begun - first >= KEEP and notes.phase == phase)
        time.sleep(draw.uniform(0.0, 0.004) if PHASES[phase] in ("writing", "fsync") else 0.0)
    if die is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the writer failed: {status}"
    return notes.phase, notes


def check(path: str, notes: Notes, first: int) -> int:
    """Every checkpoint that was complete and is to be kept is there, and whole; the latest step."""
    folder = CheckpointFolder(path, KEEP)
    folder.prepare()
    assert not [name for name in os.listdir(path) if "unfinished" in name]
    steps = folder.steps()
    wanted = range(max(1, notes.complete - KEEP + 1), notes.complete + 1)
    assert set(wanted) <= {*steps} | {step for step in wanted if step < steps[-1] - KEEP + 1}
    for step in steps:
        tree = folder._read(step)
        assert torch.equal(tree["model"], tree_of(step)["model"])
    assert not steps or notes.complete <= steps[-1] <= max(notes.begun, notes.complete)
    return steps[-1] if steps else 0


def main() -> None:
    path, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    draw = random.Random(seed)
    fallen = dict.fromkeys(PHASES, 0)
    latest = 0
    for number in range(kills):
        phase, notes = kill_one(path, latest + 1, number, draw)
        fallen[PHASES[phase]] += 1
        latest = check(path, notes, latest + 1)
    print(json.dumps({"kills": kills, "in": fallen, "latest step": latest}))


if __name__ == "__main__":
    main()
