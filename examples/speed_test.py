"""Normal against distributed: how much faster is a training with hvdlite here, and what limits it?

    hvdrun -np 2 python examples/speed_test.py --model mlp --batch-size 128

The same model is trained with the same batches, by rank 0 alone while the others wait (which costs
no CPU), and by all ranks, each with its part of the batch; in turns, and of each the median counts.
Two more measurements tell where the time goes: rank 0 alone with one rank's part, and all ranks at
once with theirs but nothing sent. Of each step that is longer than the ideal one, which is that of
one process divided by the number of ranks, these are the reasons:

    batch size       a step with 1/n of the batch takes more than 1/n of the time
    cores            the ranks compute more slowly at the same time than one alone
    data             the batches do not come n times as fast
    communication    gradients that are sent while nothing is computed

The last line has the verdict.
"""

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import torch
from networks import MEASURED
from speed_verdict import Time, Times, median, reasons, verdict
from torch import Tensor
from torch.nn.functional import cross_entropy

import hvdlite as hvd

IMAGES = 1024


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MEASURED), default="mlp")
    parser.add_argument(
        "--batch-size", type=int, default=128, help="images per step, over all ranks together"
    )
    parser.add_argument("--rounds", type=int, default=7, help="each measures everything once")
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement")
    parser.add_argument(
        "--slow-data", type=float, default=0.0, metavar="SECONDS", help="each batch takes it more"
    )
    parser.add_argument(
        "--fp16-allreduce", action="store_true", help="send the gradients as 16-bit floats"
    )
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


class Trainer:
    """A model, its optimizer and its batches."""

    def __init__(self, args: argparse.Namespace, device: torch.device, distributed: bool) -> None:
        make, shape = MEASURED[args.model]
        torch.manual_seed(0)
        self.args, self.device = args, device
        self.model = make().to(device)
        self.images = torch.randn(IMAGES, *shape)
        self.labels = torch.randint(10, (IMAGES,))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if distributed:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer,
                named_parameters=self.model.named_parameters(),
                compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
                op=hvd.Sum,  # each rank divides by the whole batch
            )

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            rows = torch.randint(IMAGES, (size,))
            if self.args.slow_data > 0:
                time.sleep(self.args.slow_data)
            yield self.images[rows].to(self.device), self.labels[rows].to(self.device)

    def steps(self, count: int, batch_size: int) -> Time:
        batches = self.batches(batch_size)
        data_s = 0.0
        begin = time.perf_counter()
        for _ in range(count):
            asked = time.perf_counter()
            images, labels = next(batches)
            data_s += time.perf_counter() - asked
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(images), labels, reduction="sum")
            (loss / self.args.batch_size).backward()
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the steps were only queued until here
        return Time((time.perf_counter() - begin) / count, data_s / count)

    def measure(self, batch_size: int) -> Time:
        self.steps(2, batch_size)  # warms caches and threads
        return self.steps(self.args.steps, batch_size)


def with_cores(cores: set[int], threads: int, function: Callable[[], Time]) -> Time:
    """Calls it on other cores: in a new thread, whose helpers in OpenMP are new, too."""
    result: list[Time] = []

    def run() -> None:
        os.sched_setaffinity(0, cores)  # of this thread
        torch.set_num_threads(threads)
        result.append(function())

    own = torch.get_num_threads()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_num_threads(own)
    return result[0]


def main() -> None:
    args = parse_args()
    hvd.init()
    ranks, rank = hvd.size(), hvd.rank()
    if not 2 <= ranks <= args.batch_size:
        raise SystemExit(
            f"{ranks} rank(s) for batches of {args.batch_size} images: expected at least 2 ranks, "
            "and an image for each; hvdrun -np 2 python examples/speed_test.py"
        )
    use_cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda" if use_cuda else "cpu")  # init has chosen this rank's GPU
    normal, distributed = Trainer(args, device, False), Trainer(args, device, True)
    hvd.broadcast_parameters(distributed.model.state_dict(), root_rank=0)

    whole = args.batch_size
    part = whole // ranks + (rank < whole % ranks)
    everyone = hvd.allgather_object(
        (socket.gethostname(), os.sched_getaffinity(0), torch.get_num_threads())
    )
    here = [(cores, threads) for host, cores, threads in everyone if host == everyone[0][0]]
    cores = set[int]().union(*(cores for cores, _ in here))
    threads = min(len(cores), sum(threads for _, threads in here))
    one_thread = torch.get_num_threads()

    phases: dict[str, tuple[bool, Callable[[], Time]]] = {  # who measures: rank 0, or all ranks
        "alone": (False, lambda: normal.measure(whole)),
        "part": (False, lambda: normal.measure(part)),
        "unsent": (True, lambda: normal.measure(part)),
        "distributed": (True, lambda: distributed.measure(part)),
    }
    if threads > one_thread and not use_cuda:
        phases["all_cores"] = (
            False,
            lambda: with_cores(cores, threads, lambda: normal.measure(whole)),
        )
    measured: dict[str, list[Time]] = {name: [] for name in phases}
    for _ in range(args.rounds):
        for name, (by_all, measure) in phases.items():
            time_here = measure() if by_all or rank == 0 else Time(0.0, 0.0)
            # The slowest rank's; and here the others wait for rank 0.
            slowest = hvd.allreduce(torch.tensor(time_here), op=hvd.Max, name=name)
            measured[name].append(Time(*slowest.tolist()))
    if rank != 0:
        return
    times = Times(**{name: median(rows) for name, rows in measured.items()})
    parameters = sum(parameter.numel() for parameter in normal.model.parameters())
    print(f"Model {args.model}, {parameters:,} parameters; {whole} images per step")
    print(f"Medians of {args.rounds} rounds of {args.steps} steps, in ms per step (of it, data):")
    texts = {
        "alone": f"normal, 1 process, {one_thread} thread(s)",
        "all_cores": f"normal, 1 process, {threads} threads",
        "part": f"1 process with one rank's {part} images",
        "unsent": f"{ranks} ranks at once, nothing sent",
        "distributed": f"distributed, {ranks} ranks",
    }
    for name, text in texts.items():
        if (time_of := getattr(times, name)) is not None:
            print(f"  {text:40} {1e3 * time_of.total_s:9.3f} ({1e3 * time_of.data_s:.3f})")
    print(f"An ideal step on {ranks} ranks: {1e3 * times.alone.total_s / ranks:.3f} ms. Added by")
    for reason, added_s in reasons(ranks, times).items():
        print(f"  {reason:40} {1e3 * added_s:9.3f}")
    print(verdict(ranks, times))


if __name__ == "__main__":
    main()
