"""What is queued on a GPU stays in order, and the host waits for nothing but the agreement."""

import torch

import hvdlite as hvd

# About a second on a GPU of these years.
CYCLES = 1_500_000_000


def is_staged():
    return hvd.size() > torch.cuda.device_count()


def late_input():
    """The input is filled long after the collective was started."""
    late = torch.cuda.Stream()
    other = torch.cuda.Stream()
    tensor = torch.zeros(100_000, device="cuda")
    late.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(late):
        torch.cuda._sleep(CYCLES)
        tensor.fill_(float(hvd.rank() + 1))
        filled = torch.cuda.Event()
        filled.record()
        handle = hvd.allreduce_async(tensor, name="late", op=hvd.Sum)
    problems = []
    with torch.cuda.stream(other):
        result = hvd.synchronize(handle)
        if not is_staged() and filled.query():
            problems.append("the host has waited for the device")
        doubled = result * 2
    torch.cuda.current_stream().wait_stream(other)
    expected = hvd.size() * (hvd.size() + 1)
    return problems + ([] if doubled.eq(expected).all() else [f"{doubled[:3]} for {expected}"])


def memory_that_is_given_away():
    """Inputs and results are dropped at once, and others take their memory."""
    problems = []
    for i in range(100):
        handles = [
            hvd.allreduce_async(torch.full((50_000,), float(i + n), device="cuda"), op=hvd.Sum)
            for n in range(4)
        ]
        for _ in range(8):
            torch.full((50_000,), -1.0, device="cuda")
        for n, handle in enumerate(handles):
            result = hvd.synchronize(handle)
            problems += [] if result.eq((i + n) * hvd.size()).all() else [f"{i} {n}: {result[:3]}"]
    return problems


def opposite_orders():
    order = list(range(20))
    if hvd.rank() % 2:
        order.reverse()
    handles = {
        n: hvd.allreduce_async(torch.full((n + 1,), float(n), device="cuda"), name=f"o{n}")
        for n in order
    }
    return [n for n in order if not hvd.synchronize(handles[n]).eq(n).all()]


def polling():
    handle = hvd.allgather_async(torch.full((3,), float(hvd.rank()), device="cuda"), name="polled")
    while not hvd.poll(handle):
        pass
    expected = [float(rank) for rank in range(hvd.size()) for _ in range(3)]
    return [] if hvd.synchronize(handle).tolist() == expected else ["wrong"]


hvd.init()
found = {
    check.__name__: check()
    for check in (late_input, memory_that_is_given_away, opposite_orders, polling)
}
# Pending at the end: it is launched all the same.
hvd.allreduce_async(torch.ones(1000, device="cuda"), name="last")
hvd.shutdown()
assert not any(found.values()), found
