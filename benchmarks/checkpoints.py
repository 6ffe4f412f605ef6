"""Measures what saving in the background costs the training loop; a program of its own.

    hvdrun -np 2 python -m benchmarks.checkpoints --megabytes 500 /a/folder

Each rank computes steps, with an allreduce in each. Rank 0 prints for each save how long the write
took, how long `save` blocked, and how much longer than without it the steps took meanwhile: their
sum, as a share of the write's time, is what saving costs. A plain write of the same bytes stands
beside it.
"""

import argparse
import statistics
import time

import torch

import hvdlite as hvd
from hvdlite.recipes import Checkpointer

TENSORS = 100
STEP_ELEMS = 512
QUIET_STEPS = 200


def step(matrix: torch.Tensor, gradient: torch.Tensor) -> float:
    """The seconds of one step: some milliseconds of computing, and an allreduce."""
    begin = time.perf_counter()
    for _ in range(4):
        matrix = matrix @ matrix
    hvd.allreduce_(gradient, name="gradient")
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--saves", type=int, default=5)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    elems = args.megabytes * 1_000_000 // 4 // TENSORS
    model = torch.nn.ParameterList(torch.ones(elems) for _ in range(TENSORS))
    matrix = torch.eye(STEP_ELEMS)
    gradient = torch.ones(10_000)
    is_written = torch.zeros(1)
    with Checkpointer(args.folder, keep=1, model=model) as checkpointer:
        for number in range(1, args.saves + 1):
            checkpointer.wait()
            hvd.barrier()
            usual_s = statistics.median([step(matrix, gradient) for _ in range(QUIET_STEPS)])
            begin = time.perf_counter()
            checkpointer.save(number)
            blocked_s = time.perf_counter() - begin
            steps_s = []
            while True:
                steps_s.append(step(matrix, gradient))
                thread = checkpointer._writer._thread
                is_written.fill_(hvd.rank() == 0 and not (thread and thread.is_alive()))
                if hvd.broadcast(is_written, 0, name="is written").item():
                    break
            written_s = time.perf_counter() - begin
            slower_s = sum(steps_s) - usual_s * len(steps_s)
            if hvd.rank() == 0:
                share = (blocked_s + slower_s) / written_s
                print(
                    f"save {number}: written after {written_s:.3f} s, save blocked "
                    f"{blocked_s * 1e3:.0f} ms, {len(steps_s)} steps of {usual_s * 1e3:.2f} ms took"
                    f" {slower_s * 1e3:.0f} ms longer: {share:.1%}; median "
                    f"{statistics.median(steps_s) * 1e3:.2f} ms, slowest {max(steps_s) * 1e3:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
