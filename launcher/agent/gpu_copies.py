"""The program that copies between the GPUs of a host, for `hvdrun --check`. `gpu_pairs` starts it
with the job's Python, which has torch, and ends it if a copy hangs."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

MARK = "hvdrun-gpus "  # begins each line of ours; libraries may write others
SIZES = (1, 4097, 1 << 20, (16 << 20) + 3)
BEGIN_S = 6.0  # the time in which pairs are begun; one takes some milliseconds
UNTOUCHED = 255  # is in no pattern


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
