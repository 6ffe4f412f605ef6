"""What a rank of a soak's job does: `python -m tests.soak.rank FOLDER`.

The folder has the job, and the programs of tests/properties that its ranks play. A rank notes there
how far it is, in a file that outlives it, and prints "right" at the end.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import torch

import hvdlite as hvd
from tests.properties.check import differences
from tests.properties.play import leave, play
from tests.soak.drawing import Job
from tests.soak.works import PLAIN, WORKS, WrongResult, asynchronous, optimizer

EXIT_CODE = 3
RAISED = "the loss is not a number"


class Position:
    """How many of the rounds' first operations this rank has ended, in a file."""

    def __init__(self, folder: Path) -> None:
        self.file = os.open(folder / f"position.{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY)
        self.ended(0)

    def ended(self, rounds: int) -> None:
        os.pwrite(self.file, b"%8d" % rounds, 0)


class Rank:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job: Job
        self.job, self.programs = pickle.loads((folder / "job").read_bytes())
        self.is_victim = int(os.environ["RANK"]) == self.job.fault.victim
        self.position = Position(folder)

    def run(self) -> None:
        hvd.init()
        hvd.barrier()
        self.position.ended(1)
        number, is_over = 1, False
        while not is_over:
            chance = random.Random(f"{self.job.seed} {self.job.number} {number}")
            self._round(chance, number)
            ends = not self.job.waits_for_end and number >= self.job.rounds
            ends = ends or (self.folder / "go").exists()
            found = hvd.allreduce(torch.tensor([int(ends)]), op=hvd.Max, name=f"over {number}")
            is_over, number = bool(found.item()), number + 1
        print("right", flush=True)

    def _round(self, chance: random.Random, number: int) -> None:
        fault = self.job.fault
        is_time = number == fault.at_round
        if is_time and self.is_victim and fault.kind == "exit":
            sys.exit(EXIT_CODE)
        if is_time and self.is_victim and fault.kind == "exception":
            raise ArithmeticError(RAISED)
        total = hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum, name=f"round {number}")
        if total.item() != hvd.size() * (hvd.size() + 1) // 2:
            raise WrongResult(f"WRONG RESULT: round {number}: {total}")
        self.position.ended(number + 1)
        name = f"{number}"
        if is_time and fault.kind in ("flipped bit", "NaN"):
            optimizer(chance, name, self._spoil)
            return
        if self.programs and chance.random() < 0.3:
            self._play(self.programs[number % len(self.programs)])
            return
        works = PLAIN if self.job.kind.plain else WORKS
        if self.job.servers or (not self.job.kind.plain and chance.random() < 0.1):
            works = (*works, asynchronous)
        chance.choice(works)(chance, name)

    def _spoil(self, model: torch.nn.Module) -> None:
        first = next(iter(model.parameters()))
        if not self.is_victim:
            return
        if self.job.fault.kind == "NaN":
            first.register_hook(lambda gradient: gradient * float("nan"))
        else:
            first.detach().view(torch.int64).view(-1)[0] ^= 1 << 62

    def _play(self, program: Any) -> None:
        outcomes = hvd.allgather_object(play(program))
        found = list(differences(program, outcomes))
        if found:
            raise WrongResult("\n".join(["WRONG RESULT", repr(program), *found]))
        # A job with servers ends with its first world.
        if not self.job.servers and random.Random(self.job.number).random() < 0.3:
            hvd.barrier()
            leave()
            hvd.init()


if __name__ == "__main__":
    Rank(Path(sys.argv[1])).run()
