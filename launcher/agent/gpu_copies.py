"""Whether memory arrives that one GPU of this host copies to another, for `hvdrun --check`: on some
hosts (PCIe with an IOMMU or ACS switched on) such a copy hangs, or other bytes arrive.

`copies` starts this file as a program with the job's Python, which has torch, and ends it if a copy
hangs."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

MARK = "hvdrun-gpus "  # begins each line of ours; libraries may write others
SIZES = (1, 4097, 1 << 20, (16 << 20) + 3)
BEGIN_S = 6.0  # the time in which pairs are begun; one takes some milliseconds
UNTOUCHED = 255  # is in no pattern
START_S = 25.0  # to import torch and to start CUDA on each GPU
PAIR_S = 4.0  # for one pair; with BEGIN_S of all pairs that makes 10 s
NUMBERS = {"pairs": 1, "begin": 2, "right": 2, "wrong": 3}  # in a line that begins so
END_S = 1.0  # a process whose GPU hangs may not end before the driver lets it
CHUNK = 65536


def copies(python: str, cwd: str, variables: dict[str, str]) -> dict[str, Any]:
    """How many pairs there are, how many were tried to their end, which are bad (from, to, what was
    wrong), and why none was tried. Takes 40 s at most."""
    from hvdrun.machine.processes import die_with_parent  # the program itself does without hvdrun

    said = _Said()
    try:
        process = subprocess.Popen(
            [python, os.path.abspath(__file__)],
            env={**os.environ, **variables},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
    except OSError as error:
        said.last = f"{error.filename or python}: {error.strerror}"
        return said.answer(None)
    assert process.stdout
    limit_s, has_ended = START_S, False
    deadline = time.monotonic() + limit_s
    with process.stdout as output:
        while not has_ended and (left_s := deadline - time.monotonic()) > 0:
            if select.select([output], [], [], left_s)[0]:
                data = os.read(output.fileno(), CHUNK)
                has_ended = not data
                if said.hear(data):  # else a library has written something
                    limit_s = PAIR_S
                    deadline = time.monotonic() + limit_s
    # With the processes that it has started: `python` may be a wrapper.
    os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    return said.answer(None if has_ended else limit_s)


class _Said:
    """What the program has said so far."""

    def __init__(self) -> None:
        self.pairs: int | None = None  # to be tried
        self.pair: list[int] = []  # that is being tried
        self.tried = 0
        self.bad: list[list[object]] = []
        self.rest = b""
        self.last = "it said nothing"

    def hear(self, data: bytes) -> bool:
        """Whether it is further than before."""
        is_further = False
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").strip()
            if not text.startswith(MARK):
                self.last = text or self.last
                continue
            word, *words = text.removeprefix(MARK).split()
            if len(words) != NUMBERS.get(word) or not all(map(str.isdecimal, words)):
                continue  # another program has written into it
            is_further = True
            numbers = [int(number) for number in words]
            if word == "pairs":
                self.pairs = numbers[0]
            elif word == "begin":
                self.pair = numbers
            else:
                if word == "wrong":
                    self.bad.append([*numbers[:2], f"of {numbers[2]} bytes not all arrived"])
                self.tried, self.pair = self.tried + 1, []
        return is_further

    def answer(self, late_s: float | None) -> dict[str, Any]:
        """late_s: how long nothing more has come; None: the program has ended."""
        problem = ""
        if self.pairs is None:
            problem = self.last if late_s is None else f"no answer within {late_s:g} s"
        elif self.pair:
            ended = f"the copy failed: {self.last}"
            what = ended if late_s is None else f"the copy hangs, for {late_s:g} s so far"
            self.bad.append([*self.pair, what])
        return {"pairs": self.pairs or 0, "tried": self.tried, "bad": self.bad, "problem": problem}


# ------------------------------------------------------------ the program


def main() -> None:
    here = os.path.dirname(__file__)
    sys.path = [folder for folder in sys.path if folder != here]  # its modules are not for torch
    torch: Any = importlib.import_module("torch")
    count = torch.cuda.device_count()
    if count < 2:
        sys.exit(f"torch sees {count} GPUs")
    pairs = [
        (source, target)
        for source in range(count)
        for target in range(count)
        if source != target and torch.cuda.can_device_access_peer(source, target)
    ]
    for device in {source for source, _ in pairs}:
        torch.cuda.synchronize(device)  # starts CUDA there, which takes its time
    _say("pairs", len(pairs))
    end = time.monotonic() + BEGIN_S
    for source, target in pairs:
        if time.monotonic() > end:
            break
        _say("begin", source, target)
        wrong = [s for s in SIZES if not arrives(torch, s, f"cuda:{source}", f"cuda:{target}")]
        _say("wrong" if wrong else "right", source, target, *wrong[:1])


def arrives(torch: Any, size: int, source: str, target: str) -> bool:
    """Whether so many bytes are the same after their way from host memory over both devices."""
    pattern = (bytearray(range(251)) * (size // 251 + 1))[:size]
    sent = torch.frombuffer(pattern, dtype=torch.uint8)
    copy = torch.full((size,), UNTOUCHED, dtype=torch.uint8, device=target)
    copy.copy_(sent.to(source))
    return bool(torch.equal(copy.cpu(), sent))


def _say(*words: object) -> None:
    # A library may have written a line without its end.
    print("\n" + MARK + " ".join(map(str, words)), flush=True)


if __name__ == "__main__":
    main()
